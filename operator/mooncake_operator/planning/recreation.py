"""How failed instances come back: at once the first time, then later and later.

Delays: 0, 30, 60, 120, 240, 480, 600 s …; a stable time as long as the longest delay makes it forget
(RoleBasedGroup's restart policy). The record stands in the pool's status before the first Pod is deleted,
so that neither the reason nor the count is lost with the Pods.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_operator.planning.desired import DesiredPool
from mooncake_operator.planning.instances import Instance, Phase
from mooncake_operator.planning.observed import PoolHistory, Recreation

BASE_DELAY_S = 30.0
MAX_DELAY_S = 600.0
STABLE_S = MAX_DELAY_S
FAILURES_SHOWN = 5


def delay_s(failures: int) -> float:
    """Seconds between the n-th failure in a row and the next life."""
    if failures <= 1:
        return 0.0
    return float(min(BASE_DELAY_S * 2 ** min(failures - 2, 16), MAX_DELAY_S))


def due_s(record: Recreation) -> float:
    """When an instance may be made again."""
    return record.at_s + delay_s(record.failures)


def is_recorded(instance: Instance) -> bool:
    """Whether this life's failure stands in the pool's status."""
    return instance.record is not None and instance.record.life == instance.life


def record(instance: Instance, now_s: float) -> Recreation:
    """What status must say before a failed instance's Pods are deleted."""
    before = instance.record.failures if instance.record else 0
    failure = instance.failure
    return Recreation(
        instance=instance.name,
        life=instance.life,
        failures=before + 1,
        at_s=now_s,
        revision=instance.revision,
        pairing=instance.pairing,
        reason=failure.reason if failure else "",
        message=failure.message if failure else "",
    )


def next_records(
    pool: DesiredPool, instances: Sequence[Instance], given_up: frozenset[str], now_s: float
) -> tuple[Recreation, ...]:
    """The records that status is to hold now: new failures added, forgiven and given-up ones left out."""
    if pool.deleted_s is not None:
        return ()
    kept = []
    for instance in instances:
        if instance.name in given_up:
            continue
        if instance.phase is Phase.FAILED and not is_recorded(instance):
            kept.append(record(instance, now_s))
        elif instance.record is not None and not _is_over(instance, now_s):
            kept.append(instance.record)
    return tuple(kept)


def next_failures(
    history: PoolHistory, records: Sequence[Recreation], known: Sequence[Recreation]
) -> tuple[Recreation, ...]:
    """The last failures for people to read, newest first."""
    lives = {(record.instance, record.life) for record in (*known, *history.last_failures)}
    fresh = [record for record in records if (record.instance, record.life) not in lives]
    return (*fresh, *history.last_failures)[:FAILURES_SHOWN]


def _is_over(instance: Instance, now_s: float) -> bool:
    """Whether a record has served: the instance is stable again, or goes for another reason."""
    if instance.phase in (Phase.LOST, Phase.DRAINING, Phase.ENDING):
        return True
    if instance.phase is not Phase.ROUTABLE or instance.leader is None:
        return False
    gate = instance.leader.gate
    since_s = gate.since_s if gate is not None else instance.leader.created_s
    return now_s >= since_s + STABLE_S
