"""What may hold a move, each rule by its name; the first that objects becomes the reason in the condition.

Modelled on cert-manager's certificate policies: pure functions in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake_core.registry import Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.draft import Draft, PoolDraft
from mooncake_operator.planning.instances import Instance, Phase

CreateCheck = Callable[[Draft, PoolDraft, str], Finding | None]
RetireCheck = Callable[[Draft, PoolDraft, Instance], Finding | None]


def first_objection(
    checks: Sequence[CreateCheck], draft: Draft, pool: PoolDraft, revision: str
) -> Finding | None:
    """The first check that objects to one more instance of a revision."""
    return next((found for check in checks if (found := check(draft, pool, revision)) is not None), None)


def within_surge(draft: Draft, pool: PoolDraft, revision: str) -> Finding | None:
    """No more than `maxSurge` instances above `replicas`."""
    if pool.places < pool.pool.replicas + pool.pool.max_surge:
        return None
    if pool.places > pool.total:
        return Finding(
            reasons.WAITING_FOR_DRAIN,
            f"{pool.pool.name}: {pool.places - pool.total} replaced instances have not gone yet",
        )
    return Finding(
        reasons.WAITING_FOR_ROUTABLE,
        f"{pool.pool.name}: {pool.updated_unavailable} new instances are not routable yet",
    )


def within_gpu_budget(draft: Draft, pool: PoolDraft, revision: str) -> Finding | None:
    """The cluster's GPUs, those of Pods that are still ending included."""
    if draft.gpu_room(pool, revision):
        return None
    return Finding(
        reasons.GPU_BUDGET,
        f"{pool.pool.name}: an instance takes {pool.gpus_of(revision)} GPUs, {draft.gpus_used} of"
        f" coordination.gpuBudget {draft.cluster.gpu_budget} are in use; raise it,"
        " lower replicas, or allow update.maxUnavailable",
    )


def within_skew(draft: Draft, pool: PoolDraft, revision: str) -> Finding | None:
    """No pool is further updated than the slowest by more than `maxSkew`, or by one instance."""
    return skew_objection(draft, pool, pool.updated + 1)


def skew_objection(draft: Draft, pool: PoolDraft, updated: int) -> Finding | None:
    """Whether a pool may have so many updated instances now."""
    target = pool.pool.updated_target
    others = [other for other in draft.pools.values() if other is not pool and other.pool.gated]
    if not pool.pool.gated or not target or not others:
        return None
    slowest = min(others, key=lambda other: other.progress)
    if min(updated / target, 1.0) - slowest.progress <= max(draft.cluster.max_skew, 1 / target) + 1e-9:
        return None
    return Finding(
        reasons.MAX_SKEW,
        f"{pool.pool.name} waits for {slowest.pool.name}, of which {slowest.progress:.0%} are updated and"
        f" routable (coordination.rollout.maxSkew {draft.cluster.max_skew:.0%})",
    )


def join_in_turn(draft: Draft, pool: PoolDraft, revision: str) -> Finding | None:
    """A store grows by one node at a time: an empty one draws all writes to itself (Mooncake issue 3688)."""
    working = [i for i in pool.live if i.routable]
    if pool.pool.gated or not pool.pool.join_interval_s or not working:
        return None
    joined_s = max(pod.created_s for i in working for pod in i.pods)
    if pool.created or len(working) < len(pool.live) or draft.now_s < joined_s + pool.pool.join_interval_s:
        return Finding(
            reasons.WAITING_FOR_JOIN,
            f"{pool.pool.name}: nodes join {pool.pool.join_interval_s} s apart; the last one is filling",
        )
    return None


def surges(draft: Draft, pool: PoolDraft) -> bool:
    """Whether a new instance can come before an old one goes."""
    if pool.pool.max_surge == 0 or pool.lacks_nodes:
        return False
    return pool.total > pool.pool.replicas or draft.gpu_room(pool, pool.pool.revision)


def floor(draft: Draft, pool: PoolDraft) -> int:
    """Instances that must stay routable while others are replaced: all, if new ones can come first."""
    wanted = pool.pool
    if surges(draft, pool):
        return wanted.replicas
    return max(wanted.replicas - wanted.max_unavailable, min(wanted.min_available, wanted.replicas))


def costs_nothing(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    """An old instance that does not work is replaced first, as long as new ones that do not work leave room.

    The bound is that of Deployments: total − floor − new ones that are not available.
    """
    if pool.total - floor(draft, pool) - pool.updated_unavailable >= 1:
        return None
    return Finding(
        reasons.FLOOR, f"{pool.pool.name}: {instance.name} is kept until new instances are routable"
    )


def replacement_may_come(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    """Down first only where the new one is allowed to follow; else it would come back as it was."""
    missing = pool.pool.replicas - (pool.total - 1)
    return skew_objection(draft, pool, pool.updated + missing) if missing > 0 else None


def keeps_floors(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    """Its pool keeps its floor of routable instances."""
    name, least = pool.pool.name, floor(draft, pool)
    if not instance.routable or (left := draft.available()[name] - 1) >= least:
        return None
    return Finding(
        reasons.FLOOR,
        f"{instance.name} stays: without it {name} would have {left} routable instances, it needs {least}",
    )


def keeps_paired_floors(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    """Every pool keeps its floor, counting those only that have partners of their own revision."""
    if not instance.routable:
        return None
    before, after = draft.usable(), draft.usable(without=instance)
    for other in draft.pools.values():
        name, least = other.pool.name, floor(draft, other)
        if after[name] < min(least, before[name]):
            return Finding(
                reasons.FLOOR,
                f"{instance.name} stays: without it {name} would have {after[name]} routable instances"
                f" with partners of their own revision, it needs {least}",
            )
    return None


def keeps_shares_level(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    """Taking one away leaves no pool behind the others by more than `maxSkew`, or by one instance."""
    if not instance.routable or not pool.pool.gated:
        return None
    after = draft.available(without=instance)
    shares = {
        other.pool.name: min(after[other.pool.name] / other.pool.replicas, 1.0)
        for other in draft.pools.values()
        if other.pool.gated and other.pool.replicas
    }
    own = shares.get(pool.pool.name, 1.0)
    bound = max(draft.cluster.max_skew, 1 / max(pool.pool.replicas, 1))
    fullest = max(shares, key=lambda name: shares[name], default=pool.pool.name)
    if shares.get(fullest, 1.0) - own <= bound + 1e-9:
        return None
    return Finding(
        reasons.MAX_SKEW,
        f"{instance.name} stays: {pool.pool.name} would be at {own:.0%},"
        f" {fullest} is at {shares[fullest]:.0%}",
    )


def keeps_ratio(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    """Prefill per decode stays within its bounds, give or take one instance, where the wanted numbers do."""
    ratio = draft.cluster.ratio
    if ratio is None or not instance.routable:
        return None
    wanted = _sums(draft, {name: p.pool.replicas for name, p in draft.pools.items()})
    prefill, decode = _sums(draft, draft.available(without=instance))
    if not ratio.allows(*wanted):
        return None
    nearby = ((prefill, decode), (prefill + 1, decode), (prefill, decode + 1))
    if any(ratio.allows(*numbers) for numbers in nearby):
        return None
    return Finding(
        reasons.RATIO,
        f"{instance.name} stays: {prefill} prefill to {decode} decode instances is not in coordination.ratio",
    )


def is_idle(instance: Instance) -> bool:
    """Whether an instance can go at once: nothing was ever placed on it."""
    if instance.phase is Phase.ROUTABLE:
        return False
    gate = instance.leader.gate if instance.leader is not None else None
    was_used = gate is not None and (gate.status or gate.reason in (reasons.DRAINING, reasons.MARKED_BY_USER))
    return not was_used and (instance.registration is None or instance.registration.in_flight == 0)


def _sums(draft: Draft, counts: dict[str, int]) -> tuple[int, int]:
    prefill = sum(n for name, n in counts.items() if draft.pools[name].pool.role is Role.PREFILL)
    decode = sum(n for name, n in counts.items() if draft.pools[name].pool.role is Role.DECODE)
    return prefill, decode
