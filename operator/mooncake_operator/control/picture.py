"""From what was gathered to what planning works on: the wanted pools, and the world as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mooncake_core.registry import Role
from mooncake_operator.control.gather import World
from mooncake_operator.kube.resources import (
    DECODE_POOL,
    KV_CACHE_POOL,
    PREFILL_POOL,
    Object,
    controller_uid,
    is_terminating,
    name_of,
    uid_of,
)
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.manifests.plan import Plan, Present
from mooncake_operator.planning.observed import (
    Observed,
    ObservedPod,
    PoolHistory,
    Registration,
    Trouble,
)
from mooncake_operator.planning.reading import observed_pod, observed_revision, pool_history, seconds
from mooncake_operator.planning.wishes import Identity, desired_cluster, present_instances

FINALIZER = "mooncake.io/drain"
_ROLES = {PREFILL_POOL.kind: Role.PREFILL, DECODE_POOL.kind: Role.DECODE}
_DRAIN_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Picture:
    """Input of one plan, and whose each planned pool is."""

    desired: DesiredCluster
    observed: Observed
    owners: Mapping[str, Object]
    """By the pool's name in planning: the live object that owns its Pods and keeps its status."""


def picture_of(
    world: World,
    plan: Plan | None,
    pools: Mapping[str, Object],
    registry: Mapping[str, Registration] | None,
    now_s: float,
    causes: Mapping[str, Trouble] | None = None,
) -> Picture:
    """Bring it together.

    Args:
        world: as gathered.
        plan: what Pods are rendered from; None = nothing is to be made any more.
        pools: live pool objects by name.
        registry: what the schedulers know.
        now_s: Unix seconds.
        causes: by Pods' uids, what keeps them though their status does not say it.
    """
    leaving = [pool for pool in pools.values() if is_terminating(pool) and pool["kind"] in _ROLES]
    wanted = DesiredCluster(pools=())
    owners: dict[str, Object] = {}
    if plan is not None and world.cluster is not None:
        staying = {name: _identity(pool) for name, pool in pools.items() if not is_terminating(pool)}
        wanted = desired_cluster(plan, _identity(world.cluster), staying)
        by_uid = {uid_of(obj): obj for obj in (world.cluster, *pools.values())}
        owners = {pool.name: by_uid[pool.uid] for pool in wanted.pools}
    owners |= {name_of(pool): pool for pool in leaving}
    wanted = replace(wanted, pools=(*wanted.pools, *map(_leaving, leaving)))
    return Picture(wanted, _observed(world, wanted.pools, owners, registry, now_s, causes or {}), owners)


def engines_there(pods: Iterable[Object], pools: Iterable[Object]) -> dict[str, list[Present]]:
    """Instances of live pools by pool, for schedulers that read them from a file.

    Args:
        pods: of the namespace, whosever they are.
        pools: whose instances count.
    """
    owners = {uid_of(pool) for pool in pools}
    return present_instances(observed_pod(pod) for pod in pods if controller_uid(pod) in owners)


def _observed(
    world: World,
    pools: Iterable[DesiredPool],
    owners: Mapping[str, Object],
    registry: Mapping[str, Registration] | None,
    now_s: float,
    causes: Mapping[str, Trouble],
) -> Observed:
    revisions = [obj for (kind, _), obj in (world.owned or {}).items() if kind == "ControllerRevision"]
    return Observed(
        now_s=now_s,
        pods=tuple(pod_with_cause(pod, causes) for pod in world.pods),
        revisions=tuple(map(observed_revision, revisions)),
        registry=registry,
        histories={pool.name: _history(pool, owners[pool.name]) for pool in pools},
        namespace_terminating=world.namespace_terminating,
    )


def pod_with_cause(pod: Object, causes: Mapping[str, Trouble]) -> ObservedPod:
    """A Pod as observed, its trouble completed."""
    seen = observed_pod(pod)
    cause = causes.get(seen.uid)
    return replace(seen, trouble=cause) if cause is not None else seen


def _history(pool: DesiredPool, owner: Object) -> PoolHistory:
    """A pool's own part of a status that it may share: a store's masters write beside its nodes."""
    history = pool_history(owner.get("status"))
    records = tuple(r for r in history.recreations if pool.ordinal(r.instance) is not None)
    if pool.name == name_of(owner):
        return replace(history, recreations=records)
    return PoolHistory(recreations=records)


def _identity(live: Object) -> Identity:
    metadata = live["metadata"]
    deleted = metadata.get("deletionTimestamp")
    return Identity(
        uid=uid_of(live),
        generation=int(metadata.get("generation") or 0),
        deleted_s=seconds(deleted) if deleted else None,
        # Stores are not drained, hence hold nothing up.
        has_finalizer=FINALIZER in (metadata.get("finalizers") or ()) or live["kind"] == KV_CACHE_POOL.kind,
    )


def _leaving(pool: Object) -> DesiredPool:
    """A pool that goes: of its spec only what tells how. It may have no cluster any more."""
    spec: Mapping[str, Any] = pool.get("spec") or {}
    identity = _identity(pool)
    return DesiredPool(
        name=name_of(pool),
        uid=identity.uid,
        role=_ROLES[pool["kind"]],
        replicas=int(spec.get("replicas") or 1),
        revision=str((pool.get("status") or {}).get("updateRevision") or ""),
        size=int((spec.get("instance") or {}).get("size") or 1),
        drain_timeout_s=int((spec.get("drain") or {}).get("timeoutSeconds") or _DRAIN_TIMEOUT_S),
        deleted_s=identity.deleted_s,
        has_finalizer=identity.has_finalizer,
        generation=identity.generation,
    )
