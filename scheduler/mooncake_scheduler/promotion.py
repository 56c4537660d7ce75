"""Blocks of a conversation are brought from SSD to DRAM before its next turn, and kept there until then.

The decisions are the Conductor's (`conductor.tiering`), the streams are those of `core.promotion`. Every
scheduler tells of the prompts that it places; the one that leads plans for all.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from mooncake_core.promotion import Came, Cursor, Found, PromotionStreams, Turn, Wanted
from mooncake_core.resp import ReplyError
from mooncake_scheduler.conductor.tiering import PLAN_EVERY_S, READ_AHEAD_SHARE, Following, Wish
from mooncake_scheduler.gateway.http1 import Upstream
from mooncake_scheduler.gateway.http1.simple import fetch
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.metrics import gauge

_log = structlog.get_logger(__name__)

PLAN_LEAST_S = 0.2
"""Wall seconds between two plans, however fast model time runs."""
LEAD_TTL_S = 5.0
MEASURE_EVERY_S = 10.0
SSD_BYTES_PER_S = 2e9
"""Of one node's, where no profile tells: a single NVMe drive reads no less."""
FILLED = 0.85
"""Of DRAM, that a store uses for certain: at 0.9 it makes room for 0.05 by default."""
_LONGEST_S = 5.0
_GIVE_WAY_S = 0.0005
"""A plan lets go of the interpreter so soon: with Python's 5 ms each wake-up of a request waits that long."""
_TURNS_A_READ = 50
"""A prompt's keys may be 64 KB, and requests wait while they are taken in."""
_FINDINGS_A_READ = 250
_ANSWER_WITHIN_S = 2.0
"""Less than `LEAD_TTL_S`: a master that hangs must not end the lead."""


class TurnLog:
    """What this scheduler tells of its prompts.

    Args:
        streams: where it is told.
        roster: knows whether the store is there.
        store: id of the store.
    """

    def __init__(self, streams: PromotionStreams, roster: Roster, store: str) -> None:
        self._streams = streams
        self._roster = roster
        self._store = store

    def came(self, request: str, tenant: str, keys: Sequence[int]) -> None:
        """A request was placed; `keys` are those of its prompt's full blocks."""
        if self._store in self._roster.stores:
            with suppress(ConnectionError):
                self._streams.came(request, tenant, keys)

    def ended(self, request: str, *, stored: bool) -> None:
        """It has ended; `stored`: its prompt was computed."""
        if self._store in self._roster.stores:
            with suppress(ConnectionError):
                self._streams.ended(request, stored=stored)


class StoreSize(NamedTuple):
    """What a store's master tells of it."""

    dram_blocks: float
    block_bytes: float
    nodes: int


class Promoter:
    """Plans, while it is the one that leads.

    Args:
        streams: where turns are read, and wishes written.
        roster: knows the store's master, and how large blocks are.
        store: id of the store.
        who: this scheduler, told apart from all others.
        time_scale: model seconds per wall second.
        ssd_bytes_per_s: that one node's SSD reads, in model seconds.
    """

    def __init__(
        self,
        streams: PromotionStreams,
        roster: Roster,
        store: str,
        *,
        who: str,
        time_scale: float,
        ssd_bytes_per_s: float = SSD_BYTES_PER_S,
    ) -> None:
        self.every_s = max(PLAN_LEAST_S, PLAN_EVERY_S / time_scale)
        """Wall seconds between two calls of `step`."""
        self._streams = streams
        self._roster = roster
        self._store = store
        self._who = who
        self._scale = time_scale
        self._ssd_bytes_per_s = ssd_bytes_per_s
        self._following: Following | None = None
        self._turns, self._findings = Cursor(), Cursor()
        self._heard: list[Turn] = []
        self._found: list[Found] = []
        """Read and not yet learned from: what is read once cannot be read again when the next call fails."""
        self._size: StoreSize | None = None
        self._measured_s = 0.0
        self._planned_s = 0.0
        self._master: Upstream | None = None
        self._unmeasured = ""
        """Why the store's size was not told when it was last asked for."""
        self._told_trouble = False

    @property
    def leads(self) -> bool:
        """Whether it plans for all."""
        return self._following is not None

    async def step(self) -> None:
        """Read what happened, plan, say what is wanted."""
        trouble = ""
        try:
            await self._step()
        except (ConnectionError, ReplyError) as error:
            trouble = str(error)
        trouble = trouble or self._unmeasured
        if trouble and not self._told_trouble:
            _log.warning(
                "what is read ahead of turns cannot be planned well", store=self._store, error=trouble
            )
        self._told_trouble = bool(trouble)

    async def _step(self) -> None:
        if not await self._streams.lead(self._who, LEAD_TTL_S):
            self._following = None
            return
        now_s = await self._streams.now_s()
        await self._measure(now_s)
        if self._size is None:
            return
        if self._following is None:
            await self._begin()
        await self._plan(now_s, self._size)

    async def leave(self) -> None:
        """Let another scheduler plan; call `step` no more."""
        if self._following is not None:
            self._following = None
            with suppress(ConnectionError, ReplyError):
                await self._streams.leave(self._who)
        self.close()

    def close(self) -> None:
        """Drop the connection to the master."""
        if self._master is not None:
            self._master.close()

    def families(self) -> Iterable[Metric]:
        """What became of what was read ahead; of the one that leads."""
        following = self._following
        leads, sessions = float(self.leads), float(following.sessions if following else 0)
        yield gauge("mooncake_promotion_leads", "1 while this scheduler plans for all.", [], [([], leads)])
        yield gauge(
            "mooncake_promotion_sessions",
            "Conversations that may go on.",
            [],
            [([], sessions)],
        )
        family = CounterMetricFamily(
            "mooncake_promoted_blocks",
            "Blocks brought from SSD to DRAM, by what became of them.",
            labels=["outcome"],
        )
        if following is not None:
            scores, size = following.scores, following.run_blocks
            for outcome, runs in (
                ("in_time", scores.in_time),
                ("late", scores.late),
                ("wasted", scores.wasted),
            ):
                family.add_metric([outcome], float(runs * size))
        yield family

    async def _begin(self) -> None:
        """Lead: learn from what is still told of the last turns, which nobody remembers here."""
        self._turns = Cursor()
        self._findings = await self._streams.newest(self._streams.findings)
        self._heard, self._found = [], []
        self._following = Following(self._roster.block_size_tokens)
        self._planned_s = 0.0
        _log.info("planning what is read ahead of turns", store=self._store)

    async def _plan(self, now_s: float, size: StoreSize) -> None:
        following = self._following
        assert following is not None
        following.resize(size.dram_blocks)
        full = True
        while full:
            read = await self._streams.read_turns(self._turns, _TURNS_A_READ)
            self._heard += read
            full = len(read) == _TURNS_A_READ
        self._found += await self._streams.read_findings(self._findings, _FINDINGS_A_READ)
        turns, self._heard = self._heard, []
        findings, self._found = self._found, []
        # It was long not asked where nobody led, and nobody reads for longer than this at once.
        seconds = min(_LONGEST_S, (now_s - self._planned_s)) * self._scale
        self._planned_s = now_s
        most_blocks = READ_AHEAD_SHARE * self._ssd_bytes_per_s * size.nodes * seconds / size.block_bytes
        # A thousand conversations take tens of milliseconds, in which requests must go on.
        with _giving_way():
            wishes, keep = await asyncio.to_thread(
                _decide, following, turns, findings, now_s, self._scale, most_blocks
            )
        wanted = [Wanted(wish.number, wish.keys) for wish in wishes]
        if keep:
            wanted.append(Wanted(0, keep))
        await self._streams.want(wanted)

    async def _measure(self, now_s: float) -> None:
        if self._size is not None and 0 <= now_s - self._measured_s < MEASURE_EVERY_S:
            return
        store = self._roster.stores.get(self._store)
        if store is None:
            self._size = None
            return
        if self._master is None or self._master.url != store.url:
            self.close()
            self._master = Upstream(store.url)
        # One that does not answer is as large as it was: who leads goes on learning from turns meanwhile.
        self._measured_s = now_s
        self._unmeasured = ""
        try:
            status, body = await fetch(self._master, b"GET", b"/metrics", timeout_s=_ANSWER_WITHIN_S)
            if status != 200:
                raise ValueError(f"HTTP {status}; it must be the admin port of the store's master")
            self._size = store_size(body.decode(errors="replace")) or self._size
        except (ConnectionError, ValueError) as error:
            self._unmeasured = f"{store.url}/metrics: {error}"


@contextmanager
def _giving_way() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_GIVE_WAY_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def _decide(
    following: Following,
    turns: Iterable[Turn],
    findings: Iterable[Found],
    now_s: float,
    scale: float,
    most_blocks: float,
) -> tuple[list[Wish], array[int]]:
    for turn in turns:
        if isinstance(turn, Came):
            following.came(turn.request, turn.tenant, turn.keys, turn.at_s * scale)
        else:
            following.ended(turn.request, turn.at_s * scale, stored=turn.stored)
    for found in findings:
        brought, there = frozenset(found.brought), frozenset(found.there)
        following.found(found.number, brought, there, found.gone, found.at_s * scale)
    return following.plan(now_s * scale, most_blocks), array("Q", following.keep(now_s * scale))


def store_size(metrics: str) -> StoreSize | None:
    """What the `/metrics` of a store's master say of its size; None where it holds nothing yet."""
    values: dict[str, float] = {}
    nodes = 0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "segment_total_capacity_bytes":
                nodes += 1
            elif not sample.labels:
                values[sample.name] = sample.value
    count = values.get("master_value_size_bytes_count", 0.0)
    capacity_bytes = values.get("master_total_capacity_bytes", 0.0)
    if not count or not nodes or not capacity_bytes:
        return None
    block_bytes = values.get("master_value_size_bytes_sum", 0.0) / count
    return StoreSize(FILLED * capacity_bytes / block_bytes, block_bytes, nodes) if block_bytes else None
