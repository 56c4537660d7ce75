"""From a cluster and its pools to the numbers that planning works with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mooncake_core.registry import Role
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.manifests.inputs import pairing_revision, pool_revision, store_revisions
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan, Present, StorePlan
from mooncake_operator.planning.manifests.redis import redis_revision
from mooncake_operator.planning.observed import ObservedPod

JOIN_INTERVAL_S = 60


@dataclass(frozen=True, slots=True)
class Identity:
    """What the API server knows of a live object and no manifest says."""

    uid: str
    generation: int = 0
    deleted_s: float | None = None
    """When its deletion was asked for, Unix seconds."""
    has_finalizer: bool = False


def desired_cluster(plan: Plan, cluster: Identity, pools: Mapping[str, Identity]) -> DesiredCluster:
    """What planning is to bring about.

    Args:
        plan: what the manifests are rendered from; replicas are the live pools'.
        cluster: the live MooncakeCluster, which owns the managed Redis.
        pools: live pool objects by name; pools that are not there yet are not planned.
    """
    coordination = plan.cluster.spec.coordination
    found = [_engines(plan, pool, pools[pool.name]) for pool in plan.engine_pools if pool.name in pools]
    if plan.store is not None and plan.store.name in pools:
        found += _store(plan, plan.store, pools[plan.store.name])
    if plan.manages_redis:
        found.append(_redis(plan, cluster))
    desired = DesiredCluster(
        pools=tuple(found),
        uid=cluster.uid,
        ratio=coordination.ratio,
        gpu_budget=coordination.gpu_budget,
        protocol=plan.cluster.spec.network.protocol,
    )
    if coordination.rollout is None:
        return desired
    return replace(
        desired,
        max_skew=coordination.rollout.skew,
        progress_deadline_s=coordination.rollout.progress_deadline_s,
    )


def present_instances(pods: Iterable[ObservedPod]) -> dict[str, list[Present]]:
    """Engine instances by pool for schedulers without a registry of their own, by name; see `render`."""
    found: dict[str, list[Present]] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.owner_uid and pod.pool and pod.pairing and pod.rank == 0 and pod.deleted_s is None:
            found.setdefault(pod.pool, []).append(Present(pod.instance, pod.pairing, pod.size))
    return found


def _engines(plan: Plan, pool: EnginePoolPlan, identity: Identity) -> DesiredPool:
    spec = pool.spec
    gpu = spec.resources.gpu
    return DesiredPool(
        name=pool.name,
        uid=identity.uid,
        role=pool.role,
        replicas=spec.replicas,
        revision=pool_revision(plan, pool),
        pairing=pairing_revision(plan),
        size=spec.instance.size,
        gpus_per_pod=gpu.count if gpu is not None else 0,
        max_surge=spec.update.max_surge,
        max_unavailable=spec.update.max_unavailable,
        partition=spec.update.partition,
        paused=spec.update.paused,
        min_available=spec.disruption.min_available or 0,
        drain_timeout_s=spec.drain.timeout_seconds,
        deleted_s=identity.deleted_s,
        has_finalizer=identity.has_finalizer,
        generation=identity.generation,
    )


def _store(plan: Plan, store: StorePlan, identity: Identity) -> list[DesiredPool]:
    """Masters and nodes. Down first: a segment that moves in before another moves out holds nothing yet."""
    master_revision, node_revision = store_revisions(plan, store)
    masters = DesiredPool(
        name=store.master_service,
        uid=identity.uid,
        role=Role.STORE,
        replicas=store.spec.master.replicas,
        revision=master_revision,
        max_surge=0,
        deleted_s=identity.deleted_s,
        generation=identity.generation,
        stem=store.master_service,
    )
    nodes = DesiredPool(
        name=store.name,
        uid=identity.uid,
        role=Role.STORE,
        replicas=store.spec.replicas,
        revision=node_revision,
        max_surge=0,
        join_interval_s=JOIN_INTERVAL_S,
        deleted_s=identity.deleted_s,
        generation=identity.generation,
    )
    return [masters, nodes]


def _redis(plan: Plan, cluster: Identity) -> DesiredPool:
    return DesiredPool(
        name=plan.redis_name,
        uid=cluster.uid,
        role=Role.STORE,
        replicas=1,
        revision=redis_revision(plan),
        max_surge=0,
        deleted_s=cluster.deleted_s,
        generation=cluster.generation,
        stem=plan.redis_name,
    )
