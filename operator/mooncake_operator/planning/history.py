"""What a pool's status must carry from one plan to the next, so that the operator need not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mooncake_operator.planning import reasons
from mooncake_operator.planning.desired import DesiredPool
from mooncake_operator.planning.instances import Instance
from mooncake_operator.planning.observed import PoolHistory, Recreation


def next_history(
    pool: DesiredPool,
    instances: Sequence[Instance],
    records: tuple[Recreation, ...],
    failures: tuple[Recreation, ...],
    before: PoolHistory,
    now_s: float,
) -> PoolHistory:
    """The history that the status written after this plan holds."""
    begins = pool.revision != before.update_revision
    return PoolHistory(
        current_revision=_current(pool, [i for i in instances if i.live], before),
        update_revision=pool.revision,
        update_started_s=now_s if begins else before.update_started_s,
        recreations=records,
        last_failures=failures,
        conditions=before.conditions,
    )


def last_progress_s(instances: Sequence[Instance], history: PoolHistory, now_s: float) -> float:
    """When a pool last came further: a rollout's start, a new instance's gate opening, an old one's closing.

    Time in which there was nothing to do, or nothing could be done, does not count: it begins anew where a
    pool that was complete, paused or stuck has something to do. Creations are no progress, for an instance
    may crash and be made again.
    """
    moments = [history.update_started_s]
    before = history.conditions.get("Progressing")
    if before is not None and before.reason != reasons.DEADLINE_EXCEEDED:
        moments.append(now_s if before.status == "False" else before.since_s)
    for instance in instances:
        gate = instance.leader.gate if instance.leader is not None else None
        if gate is not None and gate.status == instance.updated:
            moments.append(gate.since_s)
    return max(moments)


def _current(pool: DesiredPool, live: Sequence[Instance], before: PoolHistory) -> str:
    """The revision that instances have until they are updated; the newest once all of them are."""
    if not before.current_revision or (live and all(instance.updated for instance in live)):
        return pool.revision
    outdated = Counter(instance.revision for instance in live if not instance.updated)
    if not outdated or before.current_revision in outdated or before.current_revision == pool.revision:
        return before.current_revision
    return max(sorted(outdated), key=lambda revision: outdated[revision])
