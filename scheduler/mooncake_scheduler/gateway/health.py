"""Probing engines where no sidecar does: without shared state nobody else says that one has died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mooncake_scheduler.gateway.http1.simple import fetch
from mooncake_scheduler.gateway.roster import Member, Roster

PROBE_TIMEOUT_S = 2.0
FAILURES = 2
"""Probes in a row that must fail."""


class Probes:
    """Asks each engine's /health.

    Args:
        roster: whose members are probed.
        came_back: told the id of an instance that answers again.
    """

    def __init__(self, roster: Roster, came_back: Callable[[str], None]) -> None:
        self._roster = roster
        self._came_back = came_back
        self._failures: dict[str, int] = {}

    async def probe_all(self) -> None:
        """Probe every instance once."""
        members = list(self._roster.members.values())
        await asyncio.gather(*(self._probe(member) for member in members))
        self._failures = {m.instance.id: n for m in members if (n := self._failures.get(m.instance.id, 0))}

    async def _probe(self, member: Member) -> None:
        try:
            status, _ = await fetch(member.upstream, b"GET", b"/health", timeout_s=PROBE_TIMEOUT_S)
            healthy = status == 200
        except ConnectionError:
            healthy = False
        instance_id = member.instance.id
        failures = 0 if healthy else self._failures.get(instance_id, 0) + 1
        self._failures[instance_id] = failures
        if not healthy and failures < FAILURES:
            return
        if self._roster.saw_health(member, healthy=healthy):
            self._came_back(instance_id)
