"""How far a rollout is, from the statuses of a cluster's pools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mooncake_operator.kube.resources import CLUSTER, Object, name_of
from mooncake_operator.planning import reasons
from mooncakectl.rollout.target import Target


@dataclass(frozen=True, slots=True)
class Progress:
    """One pool."""

    pool: str
    done: bool
    failed: bool
    """Whether its progress deadline is over."""
    message: str
    updated: int = 0
    replicas: int = 0

    def document(self) -> Object:
        """For programs."""
        counts = {"updated": self.updated, "replicas": self.replicas}
        return {
            "pool": self.pool,
            "done": self.done,
            "failed": self.failed,
            "message": self.message,
            **counts,
        }


async def progress_of(target: Target) -> list[Progress]:
    """All pools of a cluster, or the one pool; what the operator has not seen yet is not done."""
    target = await target.again()
    if target.resource is CLUSTER and not _is_seen(target.live, "Ready"):
        return [Progress(name_of(target.live), False, False, "the operator has not seen the newest spec yet")]
    return [_of_pool(pool) for pool in await target.pools()]


def _of_pool(pool: Object) -> Progress:
    name, wanted = name_of(pool), int(pool["spec"].get("replicas", 1))
    status = pool.get("status") or {}
    updated = int(status.get("updatedReplicas") or 0)
    if not _is_seen(pool, "Progressing"):
        message = "the operator has not seen the newest spec yet"
        return Progress(name, False, False, message, updated, wanted)
    progressing, available = _condition(pool, "Progressing"), _condition(pool, "Available")
    done = progressing["reason"] == reasons.COMPLETE and available.get("status") == "True"
    failed = progressing["reason"] == reasons.DEADLINE_EXCEEDED
    told = available if progressing["reason"] == reasons.COMPLETE and not done else progressing
    message = f"{updated} of {wanted} are of the newest revision; " + "; ".join(_words(told))
    return Progress(name, done, failed, "rolled out" if done else message, updated, wanted)


def _is_seen(obj: Object, type_: str) -> bool:
    return bool(_condition(obj, type_).get("observedGeneration") == obj["metadata"].get("generation"))


def _condition(obj: Object, type_: str) -> Object:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    found: Object = next((c for c in conditions if c["type"] == type_), {})
    return found


def _words(condition: Object) -> Iterator[str]:
    yield condition.get("reason", "")
    if condition.get("message"):
        yield condition["message"]
