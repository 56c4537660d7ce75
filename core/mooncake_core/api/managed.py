"""What the product itself sets on the Pods it renders: a user's value for it is refused, never replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mooncake_core.api.base import Problem

ENV = frozenset(
    {
        "MC_FORCE_TCP",
        "MC_TCP_BIND_ADDRESS",
        "PYTHONHASHSEED",
        "VLLM_HOST_IP",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
ENV_PREFIX = "MOONCAKE_"
ENV_FREE_PREFIX = "MOONCAKE_SIMULATOR_"
"""Switches of simulated engines (faults on demand), which are the user's."""
LABEL_PREFIXES = ("mooncake.io/", "app.kubernetes.io/")

ARGUMENTS: Mapping[str, str] = {
    "--block-size": "set engine.blockSize",
    "--data-parallel-size": "set instance.parallelism of the pool",
    "--disable-log-stats": "leave it out: it is set where a connector needs it",
    "--distributed-executor-backend": "leave it out: Pods of an instance find each other by mp",
    "--enable-prompt-tokens-details": "leave it out: it is always on",
    "--headless": "leave it out: it is what workers of an instance are started with",
    "--host": "leave it out: every port and address comes from the Pod",
    "--kv-events-config": "leave it out: the sidecar and the engine agree on it",
    "--kv-transfer-config": "set engine.connector",
    "--master-addr": "leave it out: it is the address of the instance's leader",
    "--master-port": "leave it out: every port and address comes from the Pod",
    "--model": "set model.path or model.name",
    "--no-enable-prefix-caching": "leave it out: prefix caching is what routing builds on",
    "--nnodes": "set instance.size of the pool",
    "--node-rank": "set instance.size of the pool",
    "--pipeline-parallel-size": "set instance.parallelism of the pool",
    "--port": "leave it out: every port and address comes from the Pod",
    "--profile": "set engine.simulated.profile",
    "--served-model-name": "set model.name",
    "--shutdown-timeout": "set drain.timeoutSeconds of the pool",
    "--tensor-parallel-size": "set instance.parallelism of the pool",
    "--time-scale": "set engine.simulated.timeScale",
}
_SHORT = {
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
}
_NAMES_AT_ONCE = 10
"""The API server bounds what one CEL rule may cost, and a pattern costs by its length."""


def _argument_patterns() -> Iterator[str]:
    spellings = ["[-_]".join(name.removeprefix("--").split("-")) for name in ARGUMENTS]
    for first in range(0, len(spellings), _NAMES_AT_ONCE):
        yield f"^--({'|'.join(spellings[first : first + _NAMES_AT_ONCE])})(=|$)"
    yield f"^-({'|'.join(name.removeprefix('-') for name in _SHORT)})(=|$)"


ARGUMENT_PATTERNS = tuple(_argument_patterns())
"""What `ARGUMENTS` and their other spellings look like, for CEL."""

MAIN_CONTAINERS = ("engine", "node")
"""Main containers of engine Pods and of a store's nodes."""
SIDECAR_CONTAINER = "sidecar"
VOLUMES = frozenset({"admin", "api-keys", "config", "journal", "model", "redis", "run", "shm", "ssd"})
FOLDERS = ("/etc/mooncake", "/run/mooncake", "/var/lib/mooncake")

_CONTAINER_FIELDS: Mapping[str, str] = {
    "args": "write engine.args of the cluster",
    "command": "leave it out",
    "image": "write engine.image of the cluster, or image of the KV cache pool",
    "lifecycle": "leave it out: its preStop drains the instance",
    "livenessProbe": "leave it out",
    "ports": "leave it out: ports come from the Pod's block",
    "readinessProbe": "leave it out",
    "startupProbe": "leave it out",
}
_POD_FIELDS: Mapping[str, str] = {
    "hostNetwork": "not yet supported; leave it out",
    "hostname": "leave it out: Pods are found by it",
    "restartPolicy": "leave it out: instances are restarted by the operator",
    "subdomain": "leave it out: Pods are found by it",
    "terminationGracePeriodSeconds": "write drain.timeoutSeconds",
}


def is_managed_env(name: str) -> bool:
    """Whether the product sets this environment variable."""
    return name in ENV or (name.startswith(ENV_PREFIX) and not name.startswith(ENV_FREE_PREFIX))


def flag(argument: str) -> str:
    """The flag's name as vLLM spells it in full: `--max_model_len=5` → `--max-model-len`."""
    name = argument.split("=", 1)[0]
    name = _SHORT.get(name, name)
    return name.replace("_", "-") if name.startswith("--") else name


def argument_problems(at: str, arguments: Sequence[str]) -> Iterator[Problem]:
    """Complaints about arguments that the product sets itself."""
    for position, argument in enumerate(arguments):
        if remedy := ARGUMENTS.get(flag(argument)):
            yield Problem(f"{at}[{position}]", f"{flag(argument)} is set by Mooncake; {remedy}")


def template_problems(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Complaints about a Pod template's `spec` that contradicts what is rendered."""
    for field in sorted(_POD_FIELDS.keys() & spec.keys()):
        yield Problem(f"spec.{field}", f"must not be set; {_POD_FIELDS[field]}")
    yield from _volume_problems("spec.volumes", spec.get("volumes", []))
    for group in ("containers", "initContainers"):
        containers = spec.get(group, [])
        if not isinstance(containers, list) or not all(isinstance(item, Mapping) for item in containers):
            yield Problem(f"spec.{group}", "must be a list of containers; write [{name: engine, env: […]}]")
            continue
        for position, container in enumerate(containers):
            yield from _container_problems(f"spec.{group}[{position}]", container)


def _container_problems(at: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    name = container.get("name")
    if not isinstance(name, str) or not name:
        yield Problem(f"{at}.name", "is required; write engine, or the name of a container of your own")
        return
    if name == SIDECAR_CONTAINER:
        yield Problem(f"{at}.name", "sidecar is Mooncake's own container; choose another name")
    if name in MAIN_CONTAINERS:
        for field in sorted(_CONTAINER_FIELDS.keys() & container.keys()):
            yield Problem(f"{at}.{field}", f"must not be set; {_CONTAINER_FIELDS[field]}")
        yield from _env_problems(f"{at}.env", container.get("env", []))
        yield from _mount_problems(f"{at}.volumeMounts", container.get("volumeMounts", []))


def _env_problems(at: str, env: Any) -> Iterator[Problem]:
    if not isinstance(env, list) or not all(isinstance(item, Mapping) and "name" in item for item in env):
        yield Problem(at, "must be a list of variables; write [{name: X, value: y}]")
        return
    for position, item in enumerate(env):
        name = str(item["name"])
        if is_managed_env(name):
            yield Problem(f"{at}[{position}].name", f"{name} is set by Mooncake; remove it")


def _volume_problems(at: str, volumes: Any) -> Iterator[Problem]:
    if not isinstance(volumes, list) or not all(isinstance(item, Mapping) for item in volumes):
        yield Problem(at, "must be a list of volumes; write [{name: scratch, emptyDir: {}}]")
        return
    for position, volume in enumerate(volumes):
        if volume.get("name") in VOLUMES:
            yield Problem(
                f"{at}[{position}].name", f"{volume['name']} is Mooncake's own; choose another name"
            )


def _mount_problems(at: str, mounts: Any) -> Iterator[Problem]:
    if not isinstance(mounts, list) or not all(isinstance(item, Mapping) for item in mounts):
        yield Problem(at, "must be a list of mounts; write [{name: scratch, mountPath: /scratch}]")
        return
    for position, mount in enumerate(mounts):
        if str(mount.get("mountPath", "")).startswith(FOLDERS):
            message = f"{mount['mountPath']} is Mooncake's own; mount it elsewhere"
            yield Problem(f"{at}[{position}].mountPath", message)
