"""What new Pods are made from: rendered once, kept in a ControllerRevision, filled in for each Pod.

An instance that must come back at an old revision comes back as it was, though cluster, pool and operator
have changed since: its Pods are never rendered anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import CreatePod
from mooncake_operator.planning.desired import DesiredPool
from mooncake_operator.planning.manifests.engine import engine_pod
from mooncake_operator.planning.manifests.objects import REVISION_LABEL, Object, labels
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.pods import with_revision
from mooncake_operator.planning.manifests.redis import redis_pod
from mooncake_operator.planning.manifests.store import master_pod, node_pod

PLACEHOLDER = "__instance__"
"""Stands for the instance's name in a kept Pod."""
POOL_KEY = "mooncake.io/planned-as"
"""Label: the pool as planning calls it; a store's masters and its nodes are two."""
RANK_LABEL = "mooncake.io/rank"
PAIRING_LABEL = "mooncake.io/pairing"
GPUS = "mooncake.io/gpus"
"""Annotation: GPUs that the Pod holds, whatever their resource is called."""
LEADER = "mooncake.io/leader-uid"
"""Annotation of workers."""


def kept_pod(plan: Plan, pool: DesiredPool) -> Object:
    """The Pod of a pool's newest revision, with the placeholder for its name.

    Raises:
        KeyError: the plan has no such pool.
    """
    pod = with_revision(_rendered(plan, pool.name), pool.revision)
    metadata = pod["metadata"]
    extra = {POOL_KEY: pool.name, RANK_LABEL: "0"}
    annotations = {**metadata.get("annotations", {}), GPUS: str(pool.gpus_per_pod)}
    metadata = {**metadata, "labels": {**metadata["labels"], **extra}, "annotations": annotations}
    if not pool.gated:
        return {**pod, "metadata": metadata}
    gates = [*pod["spec"].get("readinessGates", []), {"conditionType": reasons.GATE}]
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "readinessGates": gates}}


def revision_name(pool: str, revision: str) -> str:
    """Name of the ControllerRevision object."""
    return f"{pool}-{revision}"


def controller_revision(plan: Plan, pool: DesiredPool, number: int, owner: Mapping[str, Any]) -> Object:
    """The object that keeps a pool's newest revision.

    Args:
        plan: what is rendered from.
        pool: the pool, whose newest revision it is.
        number: its place in the history.
        owner: made by `owner_reference`.
    """
    own = labels(plan, "revision")
    own |= {POOL_KEY: pool.name, REVISION_LABEL: pool.revision}
    if pool.pairing:
        own[PAIRING_LABEL] = pool.pairing
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": revision_name(pool.name, pool.revision),
            "namespace": plan.namespace,
            "labels": own,
            "ownerReferences": [dict(owner)],
        },
        "revision": number,
        "data": {"pod": kept_pod(plan, pool)},
    }


def pod_of(revision: Mapping[str, Any], action: CreatePod, owner: Mapping[str, Any]) -> Object:
    """The Pod that an action wants made.

    Args:
        revision: the live ControllerRevision, or the one about to be made.
        action: the action.
        owner: made by `owner_reference`.
    """
    pod: Object = _filled(revision["data"]["pod"], action.instance)
    metadata = pod["metadata"]
    metadata["name"] = action.pod
    metadata["ownerReferences"] = [dict(owner)]
    if action.rank:
        metadata["labels"][RANK_LABEL] = str(action.rank)
        metadata["annotations"][LEADER] = action.leader_uid
        pod["spec"]["hostname"] = action.pod
        # The schedulers know the leader only.
        pod["spec"].pop("readinessGates", None)
    return pod


def owner_reference(owner: Mapping[str, Any]) -> Object:
    """A reference that makes a live object the controller of another."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _rendered(plan: Plan, pool: str) -> Object:
    if plan.manages_redis and pool == plan.redis_name:
        return redis_pod(plan, PLACEHOLDER)
    if plan.store is not None and pool == plan.store.name:
        return node_pod(plan, plan.store, PLACEHOLDER)
    if plan.store is not None and pool == plan.store.master_service:
        return master_pod(plan, plan.store, PLACEHOLDER)
    return engine_pod(plan, _engine_pool(plan, pool), PLACEHOLDER)


def _engine_pool(plan: Plan, name: str) -> EnginePoolPlan:
    for pool in plan.engine_pools:
        if pool.name == name:
            return pool
    raise KeyError(name)


def _filled(value: Any, instance: str) -> Any:
    """A deep copy with the instance's name in its places."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, instance)
    if isinstance(value, Mapping):
        return {key: _filled(inner, instance) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, instance) for inner in value]
    return value
