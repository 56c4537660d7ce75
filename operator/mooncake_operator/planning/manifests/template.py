"""What a user says of Pods, merged into rendered ones by the keys that Kubernetes merges lists by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mooncake_core.api.managed import SIDECAR_CONTAINER
from mooncake_core.api.pods import PodTemplate
from mooncake_operator.planning.manifests.objects import Object

# Strategic merge keys of the lists in a PodSpec; other lists are appended to.
_MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
}


def finished(pod: Object, template: PodTemplate | None, requests: Mapping[str, Mapping[str, str]]) -> Object:
    """The Pod, or a Deployment's template of one, as it is handed over.

    Args:
        pod: as rendered.
        template: what its user adds.
        requests: what containers ask for whose `resources` nobody says anything of. A user's word replaces it
            as a whole: a limit of theirs may be below our request, which the API server refuses.
    """
    merged = _with_template(pod, template)
    spec = merged["spec"]
    groups = {
        group: [_finished_container(container, requests) for container in spec[group]]
        for group in ("initContainers", "containers")
        if group in spec
    }
    return {**merged, "spec": {**spec, **groups}}


def _finished_container(container: Object, requests: Mapping[str, Mapping[str, str]]) -> Object:
    # How a container ended, a user's too, is read from its status, when its logs may be gone.
    result = {"terminationMessagePolicy": "FallbackToLogsOnError", **container}
    if container.get("resources") is None and container["name"] in requests:
        result["resources"] = {"requests": dict(requests[container["name"]])}
    return result


def _with_template(pod: Object, template: PodTemplate | None) -> Object:
    """The Pod with the template's additions; where both say something, the template's word counts.

    What must not be overridden (managed variables, arguments, ports) the API has refused already.
    """
    if template is None:
        return pod
    metadata = dict(pod["metadata"])
    # The product's own labels win: a selector must not be led astray.
    metadata["labels"] = {**template.metadata.labels, **metadata.get("labels", {})}
    if annotations := {**template.metadata.annotations, **metadata.get("annotations", {})}:
        metadata["annotations"] = annotations
    return {**pod, "metadata": metadata, "spec": _merged(pod["spec"], _without_strangers(pod, template.spec))}


def _without_strangers(pod: Object, added: Mapping[str, Any]) -> Mapping[str, Any]:
    """A template's spec without the sidecar where the Pod has none: workers, and clusters without Redis."""
    if "containers" not in added or any(c["name"] == SIDECAR_CONTAINER for c in pod["spec"]["containers"]):
        return added
    return {**added, "containers": [c for c in added["containers"] if c["name"] != SIDECAR_CONTAINER]}


def _merged(base: Mapping[str, Any], added: Mapping[str, Any]) -> Object:
    result = dict(base)
    for field, value in added.items():
        if value is None:
            continue  # a field that is written without a value is absent, as everywhere in the API
        present = result.get(field)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            result[field] = _merged(present, value)
        elif isinstance(present, list) and isinstance(value, list):
            result[field] = _merged_list(present, value, _MERGE_KEYS.get(field))
        else:
            result[field] = value
    return result


def _merged_list(base: list[Any], added: list[Any], keys: tuple[str, ...] | None) -> list[Any]:
    if keys is None:
        return [*base, *added]
    result = list(base)
    positions = {_key(item, keys): position for position, item in enumerate(base)}
    for item in added:
        position = positions.get(_key(item, keys))
        if position is None:
            result.append(item)
        else:
            result[position] = _merged(result[position], item)
    return result


def _key(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(cast(Mapping[str, Any], item).get(key) for key in keys)
