"""From a Pod as it is declared to the processes that stand for its containers; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mooncakectl.local.environment import environment_of
from mooncakectl.local.errors import PodUnsupportedError
from mooncakectl.local.expansion import MountPaths, expand
from mooncakectl.local.probes import Action, ProbeSpec, Sleep, parse_action, parse_probe
from mooncakectl.local.volumes import Volume
from mooncakectl.local.world import Manifest, World


class ContainerKind(Enum):
    """When a container runs: before the others and to its end, beside them from before, or as one of them."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


class RestartPolicy(Enum):
    """After which ends a container starts again."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A container, ready to be started as a process."""

    pod: str
    name: str
    kind: ContainerKind
    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str | None
    restart: RestartPolicy
    startup: ProbeSpec | None = None
    liveness: ProbeSpec | None = None
    readiness: ProbeSpec | None = None
    pre_stop: Action | Sleep | None = None


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A Pod whose references are all resolved to this machine."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    containers: tuple[ContainerSpec, ...]
    volumes: tuple[Volume, ...]
    grace_s: float

    def of_kind(self, kind: ContainerKind) -> tuple[ContainerSpec, ...]:
        """The containers of one kind, in the declared order."""
        return tuple(container for container in self.containers if container.kind is kind)


def pod_spec(
    pod: Manifest,
    world: World,
    *,
    volumes: Sequence[Volume],
    folder_of: Callable[[Volume], str],
    program: Callable[[str], str],
) -> PodSpec:
    """Resolve a Pod.

    Args:
        pod: the Pod as rendered for Kubernetes.
        world: where its ConfigMap and Secret references lead.
        volumes: its volumes, from `volumes_of`.
        folder_of: the local folder of a volume.
        program: the first word of a command → the file to execute.

    Raises:
        PodUnsupportedError: something cannot be run here; names the field.
    """
    spec = pod["spec"]
    name = pod["metadata"]["name"]
    folders = {volume.name: folder_of(volume) for volume in volumes}
    policy = RestartPolicy(spec.get("restartPolicy", "Always"))
    containers = []
    for declared in spec.get("initContainers") or ():
        is_sidecar = declared.get("restartPolicy") == "Always"
        kind = ContainerKind.SIDECAR if is_sidecar else ContainerKind.INIT
        # An init container runs to its end once; only a Pod that is never restarted gives up on its failure.
        after = RestartPolicy.NEVER if policy is RestartPolicy.NEVER else RestartPolicy.ON_FAILURE
        restart = RestartPolicy.ALWAYS if is_sidecar else after
        containers.append(_container(declared, pod, world, folders, program, kind, restart))
    for declared in spec["containers"]:
        containers.append(_container(declared, pod, world, folders, program, ContainerKind.MAIN, policy))
    return PodSpec(
        name=name,
        namespace=pod["metadata"].get("namespace", "default"),
        labels=pod["metadata"].get("labels") or {},
        containers=tuple(containers),
        volumes=tuple(volumes),
        grace_s=float(spec.get("terminationGracePeriodSeconds", 30)),
    )


def _container(
    declared: Mapping[str, Any],
    pod: Manifest,
    world: World,
    folders: Mapping[str, str],
    program: Callable[[str], str],
    kind: ContainerKind,
    restart: RestartPolicy,
) -> ContainerSpec:
    where = f"Pod {pod['metadata']['name']}: container {declared['name']}"
    mounts = MountPaths(_mounts(declared, folders, where=where))
    env = environment_of(declared, pod, world, rewrite=mounts.rewrite, where=where)

    def command(words: Sequence[str]) -> tuple[str, ...]:
        local = [mounts.rewrite(word) for word in words]
        return (program(local[0]), *local[1:])

    ports = {
        port["name"]: int(port["containerPort"]) for port in declared.get("ports") or () if "name" in port
    }
    words = [expand(mounts.rewrite(word), env) for word in _words(declared, where=where)]
    working_dir = declared.get("workingDir")

    def probe(field: str) -> ProbeSpec | None:
        return parse_probe(declared.get(field), where=f"{where}: {field}", ports=ports, command=command)

    return ContainerSpec(
        pod=pod["metadata"]["name"],
        name=declared["name"],
        kind=kind,
        argv=(program(words[0]), *words[1:]),
        env=env,
        working_dir=None if working_dir is None else mounts.rewrite(working_dir),
        restart=restart,
        startup=probe("startupProbe"),
        liveness=probe("livenessProbe"),
        readiness=probe("readinessProbe"),
        pre_stop=_pre_stop(declared, where=where, ports=ports, command=command),
    )


def _words(declared: Mapping[str, Any], *, where: str) -> list[str]:
    command = list(declared.get("command") or ())
    args = list(declared.get("args") or ())
    if not command and declared["name"] == "redis":
        # The one image whose entry point is known without the image.
        command = [] if args[:1] == ["redis-server"] else ["redis-server"]
    if not command and not args:
        raise PodUnsupportedError(
            where, "no command; images do not run on this machine, so write the command"
        )
    if not command and declared["name"] != "redis":
        raise PodUnsupportedError(
            where, "args without command; images do not run on this machine: write both"
        )
    return command + args


def _mounts(declared: Mapping[str, Any], folders: Mapping[str, str], *, where: str) -> dict[str, str]:
    mounts = {}
    for mount in declared.get("volumeMounts") or ():
        if mount["name"] not in folders:
            raise PodUnsupportedError(where, f"volumeMounts[{mount['name']}]: the Pod has no such volume")
        if "subPathExpr" in mount:
            raise PodUnsupportedError(where, f"volumeMounts[{mount['name']}]: subPathExpr; write subPath")
        sub_path = mount.get("subPath", "")
        mounts[mount["mountPath"]] = f"{folders[mount['name']]}/{sub_path}".rstrip("/")
    return mounts


def _pre_stop(
    declared: Mapping[str, Any],
    *,
    where: str,
    ports: Mapping[str, int],
    command: Callable[[list[str]], tuple[str, ...]],
) -> Action | Sleep | None:
    lifecycle = declared.get("lifecycle") or {}
    if "postStart" in lifecycle:
        raise PodUnsupportedError(
            f"{where}: lifecycle.postStart", "not run on this machine: use an init container"
        )
    hook = lifecycle.get("preStop")
    if hook is None:
        return None
    if "sleep" in hook:
        return Sleep(float(hook["sleep"]["seconds"]))
    return parse_action(hook, where=f"{where}: lifecycle.preStop", ports=ports, command=command)
