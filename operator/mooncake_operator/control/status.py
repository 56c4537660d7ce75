"""Statuses: written by server-side apply, only when they differ, with an Event for what has turned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from mooncake_operator.kube.applier import MANAGER
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError, PreconditionError
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import Object, name_of, uid_of
from mooncake_operator.planning import reasons

_LONGEST_MESSAGE = 4096
_BAD_WHEN_TRUE = frozenset({"Degraded"})
"""Conditions whose `True` is the bad news."""
UNDER_WAY = frozenset(
    {
        reasons.DELETING,
        reasons.NO_PODS,
        reasons.ROLLING_OUT,
        reasons.SCHEDULER_ABSENT,
        reasons.SCHEDULER_UNAVAILABLE,
        reasons.SEGMENTS_MISSING,
        reasons.TOO_FEW_ROUTABLE,
    }
)
"""Reasons of what is not as it should be yet, without anybody having to do anything."""


def utc_now() -> datetime:
    """The wall clock's time."""
    return datetime.now(UTC)


def condition(type_: str, holds: bool | None, reason: str, message: str = "") -> Object:
    """A condition without the fields that depend on the one before; None = unknown."""
    status = "Unknown" if holds is None else str(holds)
    if len(message) > _LONGEST_MESSAGE:
        message = message[: _LONGEST_MESSAGE - 1] + "…"
    return {"type": type_, "status": status, "reason": reason, "message": message}


def settled(
    conditions: Iterable[Mapping[str, Any]],
    before: Iterable[Mapping[str, Any]],
    *,
    generation: int,
    now: datetime,
) -> list[Object]:
    """Conditions with their times: a transition is a change of `status`, and of nothing else."""
    known = {old["type"]: old for old in before}
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    result = []
    for new in conditions:
        old = known.get(new["type"])
        same = old is not None and old.get("status") == new["status"]
        since = old["lastTransitionTime"] if old is not None and same else stamp
        result.append({**new, "lastTransitionTime": since, "observedGeneration": generation})
    return sorted(result, key=lambda item: str(item["type"]))


def condition_reasons(live: Object) -> set[str]:
    """All reasons that an object's conditions give as they stand."""
    return {str(item["reason"]) for item in (live.get("status") or {}).get("conditions") or ()}


class StatusWriter:
    """Writes statuses of Mooncake objects."""

    def __init__(
        self, client: Client, events: EventRecorder, *, now: Callable[[], datetime] = utc_now
    ) -> None:
        """Take the client, the recorder and the clock for transition times."""
        self._client = client
        self._events = events
        self._now = now

    async def write(self, live: Object, status: Object, conditions: Sequence[Object]) -> Object:
        """Bring an object's status to what it should be; returns the object as it then is.

        Args:
            live: the object as it was read.
            status: all of the status but conditions and observedGeneration.
            conditions: made by `condition`.
        """
        before = live.get("status") or {}
        generation = int(live["metadata"].get("generation") or 0)
        old = before.get("conditions") or []
        new = settled(conditions, old, generation=generation, now=self._now())
        wanted = {**status, "observedGeneration": generation, "conditions": new}
        wanted = {field: value for field, value in wanted.items() if value is not None}
        if wanted == before:
            return live
        body = {
            "apiVersion": live["apiVersion"],
            "kind": live["kind"],
            "metadata": {
                "name": name_of(live),
                "namespace": live["metadata"]["namespace"],
                "uid": uid_of(live),
            },
            "status": wanted,
        }
        try:
            written = await self._client.apply(body, manager=MANAGER, force=True, subresource="status")
        except (NotFoundError, PreconditionError):
            # Gone, or another of the same name by now: nobody is left who would read it.
            return live
        for item, kind in news(new, old):
            note = f"{item['type']} is {item['status']}"
            if item["message"]:
                note += f": {item['message']}"
            await self._events.record(live, item["reason"], note, kind=kind)
        return written


def news(
    new: Iterable[Mapping[str, Any]], old: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Literal["Normal", "Warning"]]]:
    """What users must hear of as an Event: what has gone bad and why, and what is good again.

    That something is under way, as everything is at first, is no news; that it is so again is.
    """
    known = {item["type"]: item for item in old}
    for item in new:
        before = known.get(item["type"])
        if before is not None and (before["status"], before["reason"]) == (item["status"], item["reason"]):
            continue
        if _is_bad(item):
            if item["reason"] not in UNDER_WAY or (before is not None and _is_good(before)):
                yield item, "Warning"
        elif before is not None and (_is_bad(before) or item["type"] == "Progressing") and _is_good(item):
            yield item, "Normal"


def _is_bad(item: Mapping[str, Any]) -> bool:
    if item["type"] == "Progressing":
        return item["reason"] in (reasons.DEADLINE_EXCEEDED, reasons.GPU_BUDGET)
    return bool(item["status"] == ("True" if item["type"] in _BAD_WHEN_TRUE else "False"))


def _is_good(item: Mapping[str, Any]) -> bool:
    return item["status"] != "Unknown" and not _is_bad(item)
