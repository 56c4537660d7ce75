"""Which instances come and go: scale, replacement of what is lost, and rollouts over all pools of a cluster.

Stateless: the same picture gives the same moves, and a picture in which they have come true gives none. A
rollout goes up before it goes down where `maxSurge` and the GPU budget have room, else down first within
`maxUnavailable`; no pool gets ahead of another by more than `maxSkew`; instances count only together with
partners of their own revision. Nearest relative: the planner of LWS' DisaggregatedSet (KEP 766).
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_operator.planning import checks, reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.checks import RetireCheck
from mooncake_operator.planning.draft import Draft, PoolDraft
from mooncake_operator.planning.instances import Instance, Phase

_REPLACE = (checks.within_surge, checks.within_gpu_budget, checks.join_in_turn)
_CREATE = (checks.within_surge, checks.within_gpu_budget, checks.within_skew, checks.join_in_turn)
_SHRINK: Sequence[RetireCheck] = (checks.keeps_floors, checks.keeps_paired_floors)
_RETIRE_ROUTABLE: Sequence[RetireCheck] = (
    checks.replacement_may_come,
    checks.keeps_floors,
    checks.keeps_paired_floors,
    checks.keeps_shares_level,
    checks.keeps_ratio,
)
# For want of partners everything would stop for ever: one decode instance without surge, say.
_RETIRE_ALONE: Sequence[RetireCheck] = (
    checks.replacement_may_come,
    checks.keeps_floors,
    checks.keeps_shares_level,
)
_EFFORT = {
    Phase.ABSENT: 0,
    Phase.FAILED: 1,
    Phase.RECREATING: 1,
    Phase.STARTING: 2,
    Phase.READY: 3,
    Phase.ROUTABLE: 4,
}


def decide(draft: Draft) -> None:
    """Fill in a draft: whom to retire, whom to recall, what to make."""
    for pool in draft.pools.values():
        _shrink(draft, pool)
    for pool in _slowest_first(draft):
        _fill(draft, pool)
    _roll(draft, _RETIRE_ROUTABLE)
    if not draft.moved and not draft.in_transition:
        _roll(draft, _RETIRE_ALONE)


def standstill(draft: Draft, pool: PoolDraft) -> Finding | None:
    """What keeps a pool where it is for ever: no GPUs for a new instance, and no old one that may go first.

    Nothing is under way that would change it, and nothing was decided: somebody has to.
    """
    if (
        draft.moved
        or draft.in_transition
        or pool.blocked is None
        or pool.blocked.reason != reasons.GPU_BUDGET
    ):
        return None
    revision = pool.pool.revision if pool.rolling else _revision_to_fill(draft, pool)
    more = pool.gpus_of(revision)
    kept = next((held for i in pool.live if (held := _kept_by(draft, pool, i)) is not None), None)
    why = f"; none may go first: {kept.message}" if kept is not None else ""
    return Finding(
        reasons.GPU_BUDGET,
        f"{pool.pool.name} stands still: an instance takes {more} GPUs, {draft.gpus_used} of"
        f" coordination.gpuBudget {draft.cluster.gpu_budget} are in use{why}; set coordination.gpuBudget to"
        f" {draft.gpus_used + more} or more, or lower replicas, or let more instances be missing"
        " (update.maxUnavailable, disruption.minAvailable)",
    )


def _kept_by(draft: Draft, pool: PoolDraft, instance: Instance) -> Finding | None:
    checks_of = _RETIRE_ALONE if instance.routable else (checks.costs_nothing,)
    return next((found for check in checks_of if (found := check(draft, pool, instance)) is not None), None)


def _slowest_first(draft: Draft) -> list[PoolDraft]:
    return sorted(draft.pools.values(), key=lambda pool: (_share_made(pool), pool.pool.name))


def _share_made(pool: PoolDraft) -> float:
    target = pool.pool.updated_target
    return min(pool.updated / target, 1.0) if target else 1.0


def _shrink(draft: Draft, pool: PoolDraft) -> None:
    """Take away what is too much: `replicas` was lowered, or a rollout is over."""
    while pool.total > _most(pool) and pool.live:
        candidates = sorted(pool.live, key=lambda i: (i.updated, *_least_loss(i)))
        harmless = (i for i in candidates if all(keeps(draft, pool, i) is None for keeps in _SHRINK))
        draft.retire(draft.pools[pool.pool.name], next(harmless, candidates[0]), reasons.SCALED_DOWN)


def _most(pool: PoolDraft) -> int:
    wanted = pool.pool
    mixed = pool.updated > 0 and pool.outdated > wanted.partition
    return wanted.replicas + wanted.max_surge if mixed else wanted.replicas


def _least_loss(instance: Instance) -> tuple[float, ...]:
    """Order of victims: what does not work, then what has least work, then the highest number."""
    ordinal = instance.pool.ordinal(instance.name)
    return (_EFFORT[instance.phase], instance.in_flight, -(ordinal if ordinal is not None else 0))


def _fill(draft: Draft, pool: PoolDraft) -> None:
    """Make up for what is missing: `replicas` was raised, or instances went."""
    while pool.total < pool.pool.replicas:
        revision = _revision_to_fill(draft, pool)
        if _recalled(draft, pool, revision):
            continue
        held = checks.first_objection(_REPLACE, draft, pool, revision)
        if held is not None:
            pool.blocked = held
            return
        draft.create(pool, revision)


def _revision_to_fill(draft: Draft, pool: PoolDraft) -> str:
    """The newest, unless a rollout must not go further now: then what was there before."""
    newest, old = pool.pool.revision, pool.old_revision
    if not old:
        return newest
    held = (
        (pool.pool.paused and pool.updated < pool.pool.replicas)
        or pool.updated >= pool.pool.updated_target
        or checks.within_skew(draft, pool, newest) is not None
    )
    return old if held else newest


def _recalled(draft: Draft, pool: PoolDraft, revision: str) -> bool:
    """Keep a draining instance rather than make another; the one with most work left."""
    draining = [
        i
        for i in pool.instances
        if i.phase is Phase.DRAINING and i.revision == revision and i not in pool.recalled
    ]
    if not draining:
        return False
    draft.recall(pool, max(draining, key=lambda i: (i.in_flight, i.name)))
    return True


def _roll(draft: Draft, retire_checks: Sequence[RetireCheck]) -> None:
    """Replace old instances, step by step in turn, until something must be waited for."""
    moving = True
    while moving:
        moving = False
        for pool in _slowest_first(draft):
            moving |= pool.rolling and (_made_ahead(draft, pool) or _retired_old(draft, pool, retire_checks))


def _made_ahead(draft: Draft, pool: PoolDraft) -> bool:
    if pool.updated >= pool.pool.updated_target:
        return False
    # One that is still draining has its place already.
    has_room = pool.places <= pool.pool.replicas + pool.pool.max_surge
    if (
        has_room
        and checks.within_skew(draft, pool, pool.pool.revision) is None
        and _recalled(draft, pool, pool.pool.revision)
    ):
        return True
    pool.blocked = checks.first_objection(_CREATE, draft, pool, pool.pool.revision)
    if pool.blocked is not None:
        return False
    draft.create(pool, pool.pool.revision)
    return True


def _retired_old(draft: Draft, pool: PoolDraft, retire_checks: Sequence[RetireCheck]) -> bool:
    refused: set[tuple[bool, str]] = set()
    for instance in sorted((i for i in pool.live if not i.updated), key=_least_loss):
        # The checks know two instances apart by these alone.
        kind = (instance.routable, instance.pairing)
        if kind in refused:
            continue
        applying = retire_checks if instance.routable else (checks.replacement_may_come, checks.costs_nothing)
        objection = next((f for check in applying if (f := check(draft, pool, instance)) is not None), None)
        if objection is None:
            draft.retire(pool, instance, reasons.REPLACED)
            return True
        refused.add(kind)
        pool.blocked = pool.blocked or objection
    return False
