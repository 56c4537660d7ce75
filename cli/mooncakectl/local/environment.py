"""The environment of a container, its references to Pod, ConfigMaps and Secrets resolved; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mooncakectl.local.errors import PodUnsupportedError
from mooncakectl.local.expansion import expand
from mooncakectl.local.world import Manifest, World

HOST_IP = "127.0.0.1"


def environment_of(
    container: Mapping[str, Any],
    pod: Manifest,
    world: World,
    *,
    rewrite: Callable[[str], str],
    where: str,
) -> dict[str, str]:
    """Resolve `envFrom` and `env` in Kubernetes' order: later entries win, `$(NAME)` sees earlier ones.

    Args:
        container: the declared container.
        pod: the Pod it is in, for `fieldRef`.
        world: ConfigMaps and Secrets.
        rewrite: turns mount paths into local folders, in literal values and in those from ConfigMaps.
        where: the container's place, for messages.

    Raises:
        PodUnsupportedError: a reference leads nowhere, or only a node could resolve it.
    """
    env: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix", "")
        for key, content in _referenced(source, world, where=f"{where}: envFrom").items():
            env[prefix + key] = rewrite(_text(content, where=f"{where}: envFrom: {key}"))
    for entry in container.get("env") or ():
        name = entry["name"]
        if "valueFrom" in entry:
            value = _resolve(entry["valueFrom"], pod, world, where=f"{where}: env {name}")
            if value is not None:
                env[name] = value
        else:
            env[name] = expand(rewrite(str(entry.get("value") or "")), env)
    return env


def _referenced(source: Mapping[str, Any], world: World, *, where: str) -> Mapping[str, bytes]:
    kind, known = ("Secret", world.secrets) if "secretRef" in source else ("ConfigMap", world.config_maps)
    reference = source.get("secretRef") or source.get("configMapRef") or {}
    if reference.get("name") in known:
        return known[reference["name"]]
    if reference.get("optional"):
        return {}
    raise PodUnsupportedError(where, f"there is no {kind} {reference.get('name')!r}")


def _resolve(source: Mapping[str, Any], pod: Manifest, world: World, *, where: str) -> str | None:
    if field := source.get("fieldRef"):
        return _field(field["fieldPath"], pod, where=where)
    for reference_field, kind, known in (
        ("secretKeyRef", "Secret", world.secrets),
        ("configMapKeyRef", "ConfigMap", world.config_maps),
    ):
        if reference := source.get(reference_field):
            content = known.get(reference["name"], {}).get(reference["key"])
            if content is not None:
                return _text(content, where=where)
            if reference.get("optional"):
                return None
            raise PodUnsupportedError(
                where, f"{kind} {reference['name']!r} with key {reference['key']!r} is missing"
            )
    kinds = ", ".join(sorted(source))
    raise PodUnsupportedError(where, f"{kinds} is known only to a node: give the value itself")


def _text(content: bytes, *, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise PodUnsupportedError(where, "the content is not text: mount it as a file") from None


def _field(path: str, pod: Manifest, *, where: str) -> str:
    metadata, spec = pod["metadata"], pod["spec"]
    for section in ("labels", "annotations"):
        prefix = f"metadata.{section}['"
        if path.startswith(prefix) and path.endswith("']"):
            return str((metadata.get(section) or {}).get(path[len(prefix) : -2], ""))
    known: dict[str, str] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", "default"),
        "metadata.uid": metadata.get("uid", metadata["name"]),
        "spec.nodeName": "localhost",
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": HOST_IP,
        "status.podIPs": HOST_IP,
        "status.hostIP": HOST_IP,
        "status.hostIPs": HOST_IP,
    }
    if path not in known:
        raise PodUnsupportedError(where, f"fieldPath {path!r}: one of {', '.join(sorted(known))}")
    return known[path]
