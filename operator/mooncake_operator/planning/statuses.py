"""A pool's status, conditions aside: counts for people and `/scale`, and what the next plan must know."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mooncake_core.api.status import MAX_INSTANCES_LISTED
from mooncake_operator.planning.history import next_history
from mooncake_operator.planning.instances import Instance, Phase
from mooncake_operator.planning.manifests.objects import RANK_LABEL
from mooncake_operator.planning.manifests.revisions import POOL_KEY
from mooncake_operator.planning.observed import Observed, Recreation
from mooncake_operator.planning.plan import PoolOutcome

_LONGEST_MESSAGE = 1024
_ALL_MESSAGES = 65_536
"""Of all that failed lately together: many fail alike, and an object has room for little more than a MiB."""


def pool_status(outcome: PoolOutcome, observed: Observed) -> dict[str, Any]:
    """The fields of `status`; written before the plan's actions are carried out."""
    pool, instances = outcome.pool, outcome.instances
    history = next_history(
        pool,
        instances,
        outcome.recreations,
        outcome.last_failures,
        observed.history(pool.name),
        observed.now_s,
    )
    live = [instance for instance in instances if instance.live]
    return {
        "replicas": len(live),
        "readyReplicas": sum(i.phase in (Phase.READY, Phase.ROUTABLE) for i in live),
        "routableReplicas": sum(i.routable for i in live),
        "updatedReplicas": sum(i.updated for i in live),
        "drainingReplicas": sum(i.phase in (Phase.DRAINING, Phase.ENDING) for i in instances),
        "currentRevision": history.current_revision,
        "updateRevision": history.update_revision,
        "updateStartedTime": timestamp(history.update_started_s),
        "selector": f"{POOL_KEY}={pool.name},{RANK_LABEL}=0",
        "instances": [_instance(i) for i in instances[:MAX_INSTANCES_LISTED]],
        "recreations": _recreations(history.recreations),
        "lastFailures": [_failure(record) for record in history.last_failures],
    }


def timestamp(at_s: float) -> str:
    """Unix seconds as Kubernetes writes times."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _instance(instance: Instance) -> dict[str, str]:
    shown = {"name": instance.name, "revision": instance.revision, "phase": instance.phase.value}
    leader = instance.leader
    return shown | {"node": leader.node} if leader is not None and leader.node else shown


def _failure(record: Recreation, longest: int = _LONGEST_MESSAGE) -> dict[str, Any]:
    shown = {
        "instance": record.instance,
        "life": record.life,
        "reason": record.reason or "Unknown",
        "message": record.message[:longest],
        "time": timestamp(record.at_s),
    }
    return {field: value for field, value in shown.items() if value}


def _recreations(records: Sequence[Recreation]) -> list[dict[str, Any]]:
    longest = min(_LONGEST_MESSAGE, _ALL_MESSAGES // max(len(records), 1))
    return [_recreation(record, longest) for record in records]


def _recreation(record: Recreation, longest: int) -> dict[str, Any]:
    kept = _failure(record, longest) | {"failures": record.failures, "revision": record.revision}
    return kept | {"pairing": record.pairing} if record.pairing else kept
