"""What of a Pod template contradicts what is rendered, by the kind of Pod: it is refused, never replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_core.api.base import Problem
from mooncake_core.api.managed import ENV, FOLDERS, SIDECAR_CONTAINER, VOLUMES, is_own_env

_OF_ANY_CONTAINER: Mapping[str, str] = {
    "args": "leave it out",
    "command": "leave it out",
    "lifecycle": "leave it out",
    "livenessProbe": "leave it out",
    "ports": "leave it out: ports come from the Pod's block",
    "readinessProbe": "leave it out",
    "startupProbe": "leave it out",
}
_OF_ANY_POD: Mapping[str, str] = {
    "hostNetwork": "not yet supported; leave it out",
    "hostname": "leave it out: Pods are found by it",
    "restartPolicy": "leave it out: instances are restarted by the operator",
    "subdomain": "leave it out: Pods are found by it",
    "terminationGracePeriodSeconds": "leave it out",
}
_OF_THE_SIDECAR = frozenset({"name", "resources"})


@dataclass(frozen=True, slots=True)
class RenderedPod:
    """One kind of Pod as far as the product renders it, with what to write instead of overriding it."""

    main: str
    """Name of the product's own container."""
    container: Mapping[str, str]
    """Fields of that container, and the remedy for each."""
    pod: Mapping[str, str]
    """Fields of the Pod's spec, and the remedy for each."""
    sidecar: bool = False
    """Whether the product's sidecar may be beside it."""
    env: frozenset[str] = frozenset()
    """Variables that the product sets on the main container, besides all of its own prefix."""

    def problems(self, spec: Mapping[str, Any]) -> Iterator[Problem]:
        """Complaints about a Pod template's `spec`."""
        for field in sorted(self.pod.keys() & spec.keys()):
            yield Problem(f"spec.{field}", f"must not be set; {self.pod[field]}")
        yield from _volume_problems("spec.volumes", spec.get("volumes", []))
        for group in ("containers", "initContainers"):
            containers = spec.get(group, [])
            if not isinstance(containers, list) or not all(isinstance(item, Mapping) for item in containers):
                example = f"[{{name: {self.main}, env: […]}}]"
                yield Problem(f"spec.{group}", f"must be a list of containers; write {example}")
                continue
            for position, container in enumerate(containers):
                yield from self._container_problems(group, f"spec.{group}[{position}]", container)

    def _container_problems(self, group: str, at: str, container: Mapping[str, Any]) -> Iterator[Problem]:
        name = container.get("name")
        if not isinstance(name, str) or not name:
            message = f"is required; write {self.main}, or the name of a container of your own"
            yield Problem(f"{at}.name", message)
        elif name == self.main and group == "containers":
            for field in sorted(self.container.keys() & container.keys()):
                yield Problem(f"{at}.{field}", f"must not be set; {self.container[field]}")
            yield from self._env_problems(f"{at}.env", container.get("env", []))
            yield from _mount_problems(f"{at}.volumeMounts", container.get("volumeMounts", []))
        elif name == self.main:
            yield Problem(f"{at}.name", f"{name} is Mooncake's own container; write it below containers")
        elif name == SIDECAR_CONTAINER and self.sidecar and group == "containers":
            for field in sorted(container.keys() - _OF_THE_SIDECAR):
                message = "must not be set; sidecar is Mooncake's own container, only its resources are yours"
                yield Problem(f"{at}.{field}", message)
        elif name == SIDECAR_CONTAINER:
            yield Problem(f"{at}.name", "sidecar is Mooncake's own container; choose another name")
        elif not container.get("image"):
            # Without an image it is none of one's own, but meant for a container that these Pods do not have.
            message = f"is required: Mooncake has no {name} here; write an image, or the name {self.main}"
            yield Problem(f"{at}.image", message)

    def _env_problems(self, at: str, env: Any) -> Iterator[Problem]:
        if not _are_named(env, "name"):
            yield Problem(at, "must be a list of variables; write [{name: X, value: y}]")
            return
        for position, item in enumerate(env):
            name = item["name"]
            if name in self.env or is_own_env(name):
                yield Problem(f"{at}[{position}].name", f"{name} is set by Mooncake; remove it")


ENGINE = RenderedPod(
    main="engine",
    container={
        **_OF_ANY_CONTAINER,
        "args": "write engine.args of the cluster",
        "image": "write engine.image of the cluster",
        "lifecycle": "leave it out: its preStop drains the instance",
    },
    pod={**_OF_ANY_POD, "terminationGracePeriodSeconds": "write drain.timeoutSeconds"},
    sidecar=True,
    env=ENV,
)
STORE_NODE = RenderedPod(
    main="node",
    container={
        **_OF_ANY_CONTAINER,
        "args": "leave it out: fields of the KV cache pool say it",
        "image": "write image of the KV cache pool",
    },
    pod=_OF_ANY_POD,
    env=ENV,
)
SCHEDULER = RenderedPod(
    main="scheduler",
    container={
        **_OF_ANY_CONTAINER,
        "args": "leave it out: write scheduler.routing, scheduler.admission or scheduler.auth",
        "image": "leave it out: the operator says it, by the chart's value images.mooncake",
        "ports": "leave it out: clients come by the Service",
    },
    pod={
        **_OF_ANY_POD,
        "hostname": "leave it out: schedulers are found by their Service",
        "restartPolicy": "leave it out: schedulers are restarted always",
        "subdomain": "leave it out: schedulers are found by their Service",
        "terminationGracePeriodSeconds": "leave it out: a scheduler that ends lets its streams end first",
    },
)
REDIS = RenderedPod(
    main="redis",
    container={
        **_OF_ANY_CONTAINER,
        "args": "leave it out, or run a Redis of your own and name it in scheduler.redis.secretRef",
        "image": "leave it out: the operator says it, by the chart's value images.redis",
    },
    pod={**_OF_ANY_POD, "restartPolicy": "leave it out: Redis is restarted always"},
)


def _are_named(items: Any, key: str) -> bool:
    """Whether these are a list of objects that can be merged by a key."""
    return isinstance(items, list) and all(
        isinstance(item, Mapping) and isinstance(item.get(key), str) for item in items
    )


def _volume_problems(at: str, volumes: Any) -> Iterator[Problem]:
    if not _are_named(volumes, "name"):
        yield Problem(at, "must be a list of volumes; write [{name: scratch, emptyDir: {}}]")
        return
    for position, volume in enumerate(volumes):
        if volume["name"] in VOLUMES:
            yield Problem(
                f"{at}[{position}].name", f"{volume['name']} is Mooncake's own; choose another name"
            )


def _mount_problems(at: str, mounts: Any) -> Iterator[Problem]:
    if not _are_named(mounts, "mountPath"):
        yield Problem(at, "must be a list of mounts; write [{name: scratch, mountPath: /scratch}]")
        return
    for position, mount in enumerate(mounts):
        if mount["mountPath"].startswith(FOLDERS):
            message = f"{mount['mountPath']} is Mooncake's own; mount it elsewhere"
            yield Problem(f"{at}[{position}].mountPath", message)
