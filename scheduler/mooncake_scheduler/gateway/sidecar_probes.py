"""Asking sidecars themselves, where the registry cannot tell how an instance fares.

Schedulers learn from the registry that an instance drains or is gone. A node's drain takes Redis and engines
at once: then no mark can be written, the instances known last stay listed, and requests would go to addresses
that nobody has any more.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from mooncake_core.registry import Instance
from mooncake_scheduler.gateway.body import UNREADABLE
from mooncake_scheduler.gateway.http1 import Upstream
from mooncake_scheduler.gateway.http1.simple import fetch
from mooncake_scheduler.gateway.roster import Member, Roster

_log = structlog.get_logger(__name__)

ANSWER_WITHIN_S = 5.0
"""Long for such an answer: a machine that is busy must not look like one that is gone."""
FAILURES = 2
"""In a row, after which an instance is out of reach; a request that could not connect is the first."""
AT_ONCE = 64


class _Said(msgspec.Struct):
    """What is read of a sidecar's `/status`."""

    draining: bool = False
    engine_answers: bool = True


class SidecarProbes:
    """Looks after the instances in doubt: all while the registry is away, else those that were not reached.

    Args:
        roster: whose members are asked about.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._failures: dict[str, int] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def look(self) -> None:
        """Ask about each instance in doubt once."""
        roster = self._roster
        in_doubt = [m for m in roster.members.values() if roster.registry_away or m.in_doubt]
        self._forget({member.instance.admin_url for member in in_doubt})
        await asyncio.gather(*(self._ask(member) for member in in_doubt))

    def close(self) -> None:
        """Drop all connections."""
        self._forget(set())

    def _forget(self, wanted: set[str]) -> None:
        for url in self._upstreams.keys() - wanted:
            self._upstreams.pop(url).close()
        known = self._roster.members.keys()
        self._failures = {name: n for name, n in self._failures.items() if name in known}

    async def _ask(self, member: Member) -> None:
        async with self._limit:
            try:
                said = await self._said(member)
            except ConnectionError:
                said = None
        name = member.instance.id
        if said is not None and said.engine_answers:
            self._failures.pop(name, None)
            self._roster.saw_health(member, healthy=True)
            self._roster.heard_drain(member, draining=said.draining)
            member.missed = False
            return
        failures = self._failures[name] = self._failures.get(name, int(member.missed)) + 1
        if failures >= FAILURES:
            self._roster.saw_health(member, healthy=False)

    def _upstream(self, instance: Instance) -> Upstream | None:
        """Its sidecar's; None where it names none that can be asked."""
        url = instance.admin_url
        upstream = self._upstreams.get(url)
        if upstream is None and url:
            try:
                upstream = self._upstreams[url] = Upstream(url)
            except ValueError as error:
                _log.warning("a sidecar cannot be asked", instance=instance.id, error=str(error))
        return upstream

    async def _said(self, member: Member) -> _Said:
        upstream = self._upstream(member.instance)
        if upstream is None:
            status, _ = await fetch(member.upstream, b"GET", b"/health", timeout_s=ANSWER_WITHIN_S)
            return _Said(engine_answers=status == 200)
        status, body = await fetch(upstream, b"GET", b"/status", timeout_s=ANSWER_WITHIN_S)
        if status != 200:
            return _Said()
        try:
            return msgspec.json.decode(body, type=_Said)
        except UNREADABLE:
            _log.warning("a sidecar's status cannot be read", instance=member.instance.id)
            return _Said()
