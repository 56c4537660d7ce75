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
from mooncake_operator.planning.manifests.groups import Member
from mooncake_operator.planning.manifests.objects import RANK_LABEL, REVISION_LABEL, Object, labels
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.pods import with_revision
from mooncake_operator.planning.manifests.redis import redis_pod
from mooncake_operator.planning.manifests.store import master_pod, node_pod

PLACEHOLDER = "__instance__"
"""Stands for the instance's name in a kept Pod."""
RANK_PLACEHOLDER = "__rank__"
"""Stands for a worker's number in a kept Pod."""
POOL_KEY = "mooncake.io/planned-as"
"""Label: the pool as planning calls it; a store's masters and its nodes are two."""
PAIRING_LABEL = "mooncake.io/pairing"
GPUS = "mooncake.io/gpus"
"""Annotation: GPUs that the Pod holds, whatever their resource is called."""
SIZE = "mooncake.io/instance-size"
"""Annotation: Pods that the instance consists of, which a later revision may want otherwise."""
LEADER = "mooncake.io/leader-uid"
"""Annotation of workers."""


def kept_pods(plan: Plan, pool: DesiredPool) -> dict[str, Object]:
    """The Pods of a pool's newest revision by what they are, with placeholders for names and ranks.

    Returns:
        `pod`, which is the leader's, and `worker`, where an instance has any.

    Raises:
        KeyError: the plan has no such pool.
    """
    leader = _kept(_rendered(plan, pool.name), pool, "0")
    if pool.gated:
        # The schedulers know the leader only.
        gates = [*leader["spec"].get("readinessGates", []), {"conditionType": reasons.GATE}]
        leader = {**leader, "spec": {**leader["spec"], "readinessGates": gates}}
    if pool.size == 1:
        return {"pod": leader}
    worker = engine_pod(plan, _engine_pool(plan, pool.name), Member(PLACEHOLDER, RANK_PLACEHOLDER))
    return {"pod": leader, "worker": _kept(worker, pool, RANK_PLACEHOLDER)}


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
        "data": kept_pods(plan, pool),
    }


def pod_of(revision: Mapping[str, Any], action: CreatePod, owner: Mapping[str, Any]) -> Object:
    """The Pod that an action wants made.

    Args:
        revision: the live ControllerRevision, or the one about to be made.
        action: the action.
        owner: made by `owner_reference`.
    """
    kept = revision["data"]["worker" if action.rank else "pod"]
    pod: Object = _filled(kept, {PLACEHOLDER: action.instance, RANK_PLACEHOLDER: str(action.rank)})
    metadata = pod["metadata"]
    metadata["ownerReferences"] = [dict(owner)]
    if action.rank:
        metadata["annotations"][LEADER] = action.leader_uid
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


def _kept(rendered: Object, pool: DesiredPool, rank: str) -> Object:
    """A rendered Pod with what its life is read from."""
    pod = with_revision(rendered, pool.revision)
    metadata = pod["metadata"]
    extra = {POOL_KEY: pool.name, RANK_LABEL: rank}
    counts = {GPUS: str(pool.gpus_per_pod), SIZE: str(pool.size)}
    annotations = {**metadata.get("annotations", {}), **counts}
    metadata = {**metadata, "labels": {**metadata["labels"], **extra}, "annotations": annotations}
    return {**pod, "metadata": metadata}


def _rendered(plan: Plan, pool: str) -> Object:
    if plan.manages_redis and pool == plan.redis_name:
        return redis_pod(plan, PLACEHOLDER)
    if plan.store is not None and pool == plan.store.name:
        return node_pod(plan, plan.store, PLACEHOLDER)
    if plan.store is not None and pool == plan.store.master_service:
        return master_pod(plan, plan.store, PLACEHOLDER)
    return engine_pod(plan, _engine_pool(plan, pool), Member(PLACEHOLDER))


def _engine_pool(plan: Plan, name: str) -> EnginePoolPlan:
    for pool in plan.engine_pools:
        if pool.name == name:
            return pool
    raise KeyError(name)


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """A deep copy with words in the places of their placeholders."""
    if isinstance(value, str):
        for placeholder, word in words.items():
            value = value.replace(placeholder, word)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(inner, words) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, words) for inner in value]
    return value
