"""What all Pods of a cluster have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mooncake_core.api.engine import ModelSpec
from mooncake_core.api.pods import PodTemplate, Resources, Scheduling
from mooncake_operator.planning.manifests.objects import REVISION_LABEL, Object, an_object, digest
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.manifests.template import finished

SHARED_MEMORY = "/dev/shm"


def a_pod(
    plan: Plan,
    name: str,
    own_labels: Mapping[str, str],
    containers: Sequence[Object],
    volumes: Sequence[Object],
    *,
    subdomain: str,
    grace_s: int = 30,
    placement: Mapping[str, Any] | None = None,
    template: PodTemplate | None = None,
    requests: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Object:
    """A Pod that other Pods find as `<name>.<subdomain>`.

    `placement` are fields of where it may run; `template` and `requests` as in `finished`.
    """
    spec: Object = {
        "hostname": name,
        "subdomain": subdomain,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        # Services would come as variables like VLLM_PORT, which vLLM takes for its own.
        "enableServiceLinks": False,
        # As first process of a namespace one is not ended by a SIGTERM that comes before it has a handler,
        # while Python still imports: its Pod would wait for all of its grace.
        "shareProcessNamespace": True,
        "containers": list(containers),
        "volumes": list(volumes),
        **(placement or {}),
    }
    return finished(an_object(plan, "v1", "Pod", name, own_labels, spec=spec), template, requests)


def with_revision(pod: Object, revision: str) -> Object:
    """The Pod labelled with the revision it was made from."""
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "labels": {**metadata["labels"], REVISION_LABEL: revision}}}


def spread(scheduling: Scheduling, own_labels: Mapping[str, str], *keys: str) -> Object:
    """Spreads Pods over the domains of a node label, counting those that have the same values of `keys`."""
    if scheduling.spread_topology_key is None:
        return {}
    constraint = {
        "maxSkew": 1,
        "topologyKey": scheduling.spread_topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {key: own_labels[key] for key in keys}},
    }
    return {"topologySpreadConstraints": [constraint]}


def revision_of(*template_pods: Object) -> str:
    """Short stable hash of Pods that were rendered with nobody's names: replicas and ports are not in it."""
    return digest(template_pods if len(template_pods) > 1 else template_pods[0])


def container_resources(resources: Resources) -> Object:
    """`resources` of a main container; requests equal limits, so that it is never throttled below them."""
    wanted: dict[str, Any] = {}
    if resources.cpu is not None:
        wanted["cpu"] = resources.cpu
    if resources.memory is not None:
        wanted["memory"] = resources.memory
    if resources.gpu is not None:
        wanted[resources.gpu.resource_name] = str(resources.gpu.count)
    return {"resources": {"requests": wanted, "limits": wanted}} if wanted else {}


def shared_memory(resources: Resources) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts of /dev/shm in the wanted size."""
    if resources.shared_memory is None:
        return [], []
    disk = {"medium": "Memory", "sizeLimit": resources.shared_memory}
    return [{"name": "shm", "emptyDir": disk}], [{"name": "shm", "mountPath": SHARED_MEMORY}]


def model_files(model: ModelSpec) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts of the model's folder."""
    if model.volume is None or model.path is None:
        return [], []
    source = model.volume.manifest()
    claim = model.volume.persistent_volume_claim
    read_only = claim is None or claim.read_only
    volume = {"name": "model", **source}
    return [volume], [{"name": "model", "mountPath": model.path, "readOnly": read_only}]
