"""Statuses: written by server-side apply, only when they differ, with an Event for what has turned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mooncake_operator.kube.applier import MANAGER
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError, PreconditionError
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import Object, name_of, uid_of

_LONGEST_MESSAGE = 4096
_BAD_WHEN_TRUE = frozenset({"Degraded"})
"""Conditions whose `True` is the bad news."""


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
        for turned in _turned(new, old):
            await self._tell(live, turned)
        return written

    async def _tell(self, live: Object, turned: Object) -> None:
        bad = (turned["status"] == "True") == (turned["type"] in _BAD_WHEN_TRUE)
        if turned["status"] == "Unknown":
            return
        note = f"{turned['type']} is {turned['status']}"
        if turned["message"]:
            note += f": {turned['message']}"
        await self._events.record(live, turned["reason"], note, kind="Warning" if bad else "Normal")


def _turned(new: Sequence[Object], old: Sequence[Mapping[str, Any]]) -> list[Object]:
    known = {item["type"]: (item.get("status"), item.get("reason")) for item in old}
    return [item for item in new if known.get(item["type"]) != (item["status"], item["reason"])]
