"""Who holds which blocks, as the gateway knows it: the shared index where there is one, and its own memory.

Without Redis residency comes from the gateway's own dispatches: a prefill's instance holds the prompt's
blocks, after the hand-over so does decode, and so does the store that they write to. Each holder is bounded
by its capacity, least recently used first, as engines do. With Redis the same memory is kept warm and used
while Redis is away or too slow; and what was dispatched a moment ago is believed until the engines report it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import structlog

from mooncake_core.index import (
    Change,
    Depth,
    MemoryIndex,
    PrefixIndex,
    Removed,
    Source,
    Stored,
    Tier,
)
from mooncake_core.registry import Instance
from mooncake_core.resp import DeadlineError
from mooncake_scheduler.gateway.recent import RecentDispatches

_log = structlog.get_logger(__name__)

LOCAL_BLOCKS = 1_000_000
"""Blocks that a gateway remembers of its own dispatches."""
JOURNAL = 20_000
"""Dispatches remembered while the shared index is there,"""
JOURNAL_KEYS = 4_000_000
"""and block keys in them: long prompts in small blocks would otherwise fill gigabytes."""
JOURNAL_BIT = 50
"""Of these, read into the own index by each request that needs it,"""
JOURNAL_SLICE = 500
"""and by each background turn."""
FAILURES = 3
"""Late answers in a row after which the shared index counts as too slow."""
AWAY_S = 1.0
"""Wall seconds for which a shared index that failed is not asked again."""
_ANY_KEYS = (1,)
"""Asked for to see whether it answers."""
BELIEVED_S = 2.0
"""Wall seconds after its predicted end for which a dispatch is believed without an engine's report."""


class _Holder:
    """One life of one holder, with what it is thought to hold, least recently used first."""

    __slots__ = ("blocks", "capacity", "sequence", "source")

    def __init__(self, source: Source, capacity: int) -> None:
        self.source = source
        self.capacity = capacity
        self.blocks: dict[int, None] = {}
        self.sequence = 0


class LocalResidency:
    """Residency from this gateway's own dispatches."""

    mode = "local"

    def __init__(self) -> None:
        self.local_index = MemoryIndex(LOCAL_BLOCKS)
        self._holders: dict[str, _Holder] = {}

    async def follow(self, instances: Sequence[Instance]) -> None:
        """Take note of who is there: new lives begin empty, those gone are forgotten."""
        present = set()
        for instance in instances:
            present.add(instance.id)
            holder = self._holders.get(instance.id)
            if holder is not None and holder.source.epoch >= instance.epoch:
                continue
            source = Source(instance.id, instance.epoch)
            await self.local_index.attach(source)
            capacity = instance.kv_capacity_tokens // max(1, instance.block_size_tokens)
            self._holders[instance.id] = _Holder(source, capacity)
        for gone in [i for i in self._holders if i not in present]:
            await self.local_index.detach(self._holders.pop(gone).source)
        await self.local_index.sweep(64)

    async def match(self, keys: Sequence[int]) -> Mapping[str, Depth]:
        """Depth in blocks by holder."""
        return self.local_index.match_now(keys)

    async def dispatched(
        self, instance_id: str, keys: Sequence[int], known_blocks: int, until_s: float
    ) -> None:
        """An instance was told to compute or to take over this prompt.

        Args:
            instance_id: the instance.
            keys: all block keys of the prompt.
            known_blocks: how many of them the match found there.
            until_s: when it is predicted to be done, monotonic wall seconds.
        """
        await self.holds(instance_id, keys, Tier.HBM)

    async def holds(self, holder_id: str, keys: Sequence[int], tier: Tier) -> None:
        """An instance or a store holds these blocks of one prompt."""
        holder = self._holders.get(holder_id)
        if holder is None or not keys:
            return
        blocks = holder.blocks
        new = []
        # The head of a prompt is used by every prompt that shares it: the tail must be forgotten first.
        for key in reversed(keys):
            if key in blocks:
                del blocks[key]
            else:
                new.append(key)
            blocks[key] = None
        changes: list[Change] = []
        if new:
            new.reverse()
            changes.append(Stored(new, tier))
        capacity = holder.capacity or LOCAL_BLOCKS
        if len(blocks) > capacity:
            oldest = [key for key, _ in zip(blocks, range(len(blocks) - capacity), strict=False)]
            for key in oldest:
                del blocks[key]
            changes.append(Removed(oldest, tier))
        if changes:
            holder.sequence += 1
            await self.local_index.apply(holder.source, changes, holder.sequence)


class SharedResidency:
    """The index on Redis, with what was dispatched a moment ago, and this gateway's memory to fall back upon.

    That memory is a journal of the last dispatches: writing one down costs next to nothing, and only when
    Redis goes away is it read into an index, a slice at a time.

    Args:
        shared: the index on Redis; raises ConnectionError when it is away or slower than its budget.
        local: an index of this gateway's own dispatches.
    """

    def __init__(self, shared: PrefixIndex, local: LocalResidency) -> None:
        self._shared = shared
        self._local = local
        self._recent = RecentDispatches()
        self._journal: deque[tuple[str, Sequence[int], Tier]] = deque()
        self._journal_keys = 0
        self._epochs: dict[str, int] = {}
        self._away_until_s = 0.0
        self.local_index = local.local_index
        self.mode = "shared"
        self.failures = 0
        self._failures_in_row = 0

    async def follow(self, instances: Sequence[Instance]) -> None:
        """As `LocalResidency.follow`; the shared index is kept by the sidecars.

        One that was away is asked whether it is back: nobody else would ask while there are no requests.
        """
        for instance in instances:
            if self._epochs.get(instance.id, instance.epoch) != instance.epoch:
                self._recent.forget(instance.id)
                lost = instance.id
                self._journal = deque(entry for entry in self._journal if entry[0] != lost)
                self._journal_keys = sum(len(keys) for _, keys, _ in self._journal)
            self._epochs[instance.id] = instance.epoch
        await self._local.follow(instances)
        if self.mode == "local":
            await self._read_journal(JOURNAL_SLICE)
            await self._ask(_ANY_KEYS, time.monotonic())

    async def match(self, keys: Sequence[int]) -> Mapping[str, Depth]:
        """Depth in blocks by holder."""
        if not keys:
            return {}
        now_s = time.monotonic()
        found = await self._ask(keys, now_s)
        if found is None:
            await self._read_journal(JOURNAL_BIT)
            return await self._local.match(keys)
        return self._recent.merge(keys, found, now_s)

    async def dispatched(
        self, instance_id: str, keys: Sequence[int], known_blocks: int, until_s: float
    ) -> None:
        """As `LocalResidency.dispatched`, believed until the engine has had time to report it."""
        if known_blocks < len(keys):
            self._recent.add(instance_id, keys, until_s + BELIEVED_S, time.monotonic())
        await self.holds(instance_id, keys, Tier.HBM)

    async def holds(self, holder_id: str, keys: Sequence[int], tier: Tier) -> None:
        """As `LocalResidency.holds`."""
        if not keys:
            return
        self._journal.append((holder_id, keys, tier))
        self._journal_keys += len(keys)
        while len(self._journal) > JOURNAL or self._journal_keys > JOURNAL_KEYS:
            self._journal_keys -= len(self._journal.popleft()[1])

    async def _ask(self, keys: Sequence[int], now_s: float) -> Mapping[str, Depth] | None:
        """What the shared index knows; None = it does not answer, or did not a moment ago."""
        if now_s < self._away_until_s:
            return None
        try:
            found = await self._shared.match(keys)
        except ConnectionError as error:
            self._failed(error)
            return None
        self._failures_in_row = 0
        if self.mode == "local":
            self.mode = "shared"
            _log.info("the shared index is back")
        return found

    def _failed(self, error: ConnectionError) -> None:
        """A late answer may be our own loop's fault; only several in a row, or a broken connection, count."""
        self.failures += 1
        self._failures_in_row += 1
        if isinstance(error, DeadlineError) and self._failures_in_row < FAILURES:
            return
        self._away_until_s = time.monotonic() + AWAY_S
        if self.mode == "shared":
            self.mode = "local"
            _log.warning("the shared index is away, own dispatches are used", error=str(error))

    async def _read_journal(self, most: int) -> None:
        """Read the latest entries into the index."""
        for _ in range(min(most, len(self._journal))):
            entry = self._journal.pop()
            self._journal_keys -= len(entry[1])
            await self._local.holds(*entry)
