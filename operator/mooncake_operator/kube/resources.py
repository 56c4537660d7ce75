"""Where each kind of object lives on the API server: a fixed table instead of discovery at every start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mooncake_core.api import API_VERSION

Object: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind and its place in the API."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """Path of a collection or an object; without a namespace that of all namespaces."""
        root = "/apis" if "/" in self.api_version else "/api"
        parts = [root, self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


CLUSTER = Resource(API_VERSION, "MooncakeCluster", "mooncakeclusters")
PREFILL_POOL = Resource(API_VERSION, "MooncakePrefillPool", "mooncakeprefillpools")
DECODE_POOL = Resource(API_VERSION, "MooncakeDecodePool", "mooncakedecodepools")
KV_CACHE_POOL = Resource(API_VERSION, "MooncakeKVCachePool", "mooncakekvcachepools")
POOLS = (PREFILL_POOL, DECODE_POOL, KV_CACHE_POOL)

NAMESPACE = Resource("v1", "Namespace", "namespaces", namespaced=False)
POD = Resource("v1", "Pod", "pods")
SERVICE = Resource("v1", "Service", "services")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
SECRET = Resource("v1", "Secret", "secrets")
DEPLOYMENT = Resource("apps/v1", "Deployment", "deployments")
CONTROLLER_REVISION = Resource("apps/v1", "ControllerRevision", "controllerrevisions")
DISRUPTION_BUDGET = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASE = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Resource("events.k8s.io/v1", "Event", "events")

OWNED = (SERVICE, CONFIG_MAP, SECRET, DEPLOYMENT, DISRUPTION_BUDGET, NETWORK_POLICY, CONTROLLER_REVISION)
"""What belongs to a cluster, Pods and pools apart."""

BY_KIND: Mapping[str, Resource] = {
    resource.kind: resource for resource in (CLUSTER, *POOLS, NAMESPACE, POD, *OWNED, LEASE, EVENT)
}


def resource_of(obj: Mapping[str, Any]) -> Resource:
    """The place of an object, by its kind.

    Raises:
        KeyError: a kind that this operator does not handle.
    """
    resource = BY_KIND.get(obj["kind"])
    if resource is None:
        raise KeyError(f"kind {obj['kind']} is none of {', '.join(BY_KIND)}")
    return resource


def name_of(obj: Mapping[str, Any]) -> str:
    """`metadata.name`."""
    name: str = obj["metadata"]["name"]
    return name


def uid_of(obj: Mapping[str, Any]) -> str:
    """`metadata.uid`; empty before the API server gave one."""
    uid: str = obj["metadata"].get("uid", "")
    return uid


def is_terminating(obj: Mapping[str, Any]) -> bool:
    """Whether the object's deletion has begun."""
    return "deletionTimestamp" in obj["metadata"]


def controller_uid(obj: Mapping[str, Any]) -> str | None:
    """Uid of the controlling owner, if there is one."""
    for reference in obj["metadata"].get("ownerReferences", ()):
        if reference.get("controller"):
            uid: str = reference["uid"]
            return uid
    return None


def owned_by(obj: Object, owner: Mapping[str, Any]) -> Object:
    """The object with `owner` as its controlling owner; a new dictionary."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": name_of(owner),
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": [reference]}}
