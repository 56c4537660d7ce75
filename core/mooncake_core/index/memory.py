"""The prefix index in one process: without Redis, in the simulator, and to fall back upon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from mooncake_core.index.contract import Change, Depth, Source, Stored
from mooncake_core.index.gallop import gallop
from mooncake_core.index.holders import HolderSets, cumulative, depths_by_slot, holding, lanes
from mooncake_core.index.stats import CHECKS, IndexStats
from mooncake_core.index.table import BlockTable
from mooncake_core.registry.contract import StaleEpochError


@dataclass(slots=True)
class _Life:
    epoch: int
    slot: int
    sequence: int = -1


class MemoryIndex:
    """`PrefixIndex` in memory: about 16 bytes a block however many hold it, exact for prefixes without holes.

    Args:
        max_blocks: blocks to remember; beyond, those stored longest ago are forgotten. None = all.
        seed: of the places where `match` looks for holes.
    """

    def __init__(self, max_blocks: int | None = None, *, seed: int = 0) -> None:
        self.stats = IndexStats()
        self._sets = HolderSets()
        self._table = BlockTable(max_blocks, lambda value: self._sets.use(value, -1))
        self._lives: dict[str, _Life] = {}
        self._names: dict[int, str] = {}
        self._live_lanes = 0
        self._stale: set[int] = set()
        self._sweeping: set[int] = set()
        self._swept_buckets = 0
        self._free_slots: list[int] = []
        self._slots = 0
        self._random = Random(seed)

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._table)

    @property
    def bytes(self) -> int:
        """Bytes of what is remembered of the blocks."""
        return self._table.bytes

    async def attach(self, source: Source) -> None:
        life = self._lives.get(source.instance)
        if life is not None:
            if source.epoch < life.epoch:
                raise StaleEpochError(_stale_message(source, life))
            if source.epoch == life.epoch:
                return
            self._end(source.instance)
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        self._lives[source.instance] = _Life(source.epoch, slot)
        self._names[slot] = source.instance
        self._live_lanes |= lanes([slot])

    async def detach(self, source: Source) -> None:
        life = self._lives.get(source.instance)
        if life is not None and life.epoch == source.epoch:
            self._end(source.instance)

    async def apply(self, source: Source, changes: Sequence[Change], sequence: int) -> int:
        life = self._lives.get(source.instance)
        if life is None or life.epoch != source.epoch:
            raise StaleEpochError(_stale_message(source, life))
        if sequence > life.sequence:
            for change in changes:
                self._carry_out(change, life.slot)
            self._table.settle()
            life.sequence = sequence
        return life.sequence

    async def match(self, keys: Sequence[int]) -> Mapping[str, Depth]:
        return self.match_now(keys)

    async def match_many(self, requests: Sequence[Sequence[int]]) -> Sequence[Mapping[str, Depth]]:
        return [self.match_now(keys) for keys in requests]

    def match_now(self, keys: Sequence[int]) -> dict[str, Depth]:
        """`match` for callers without an event loop (the simulator)."""
        get, sets, live = self._table.get, self._sets, self._live_lanes
        if not keys:
            return {}
        checks = [self._random.random() for _ in range(CHECKS)]
        found = gallop(len(keys), lambda position: cumulative(sets[get(keys[position])], live), checks)
        self.stats.count(looks=found.looks, holes=int(found.hole), overflows=0)
        return {self._names[slot]: depth for slot, depth in depths_by_slot(found.drops)}

    async def sweep(self, budget: int) -> int:
        """Clear away what ended lives have left, `budget` buckets at a time, so that their slots serve again.

        Returns:
            Ended lives still to be cleared away; 0 = nothing to do.
        """
        return self.sweep_now(budget)

    def sweep_now(self, budget: int) -> int:
        """`sweep` for callers without an event loop."""
        if not self._sweeping:
            self._sweeping, self._stale = self._stale, set()
            self._swept_buckets = 0
        if self._sweeping:
            start, stop = self._swept_buckets, self._swept_buckets + budget
            self._table.rewrite(start, stop, self._without(lanes(self._sweeping)))
            self._swept_buckets = stop
            if stop >= self._table.buckets:
                self._free_slots.extend(self._sweeping)
                self._sweeping = set()
        return len(self._sweeping) + len(self._stale)

    def _end(self, instance: str) -> None:
        slot = self._lives.pop(instance).slot
        del self._names[slot]
        self._live_lanes &= ~lanes([slot])
        self._stale.add(slot)

    def _carry_out(self, change: Change, slot: int) -> None:
        sets = self._sets
        bits = holding(slot, change.tier)
        stored = isinstance(change, Stored)
        # Neighbours mostly share their holders: what a set becomes is worked out once for the whole change.
        outcomes: dict[int, list[int]] = {}

        def replace(old: int) -> int:
            outcome = outcomes.get(old)
            if outcome is None:
                new = sets.id_of(sets[old] | bits if stored else sets[old] & ~bits)
                outcome = outcomes[old] = [new, 0]
                # What the table forgets meanwhile must not free the ids remembered here.
                sets.use(old, 1)
                sets.use(new, 1)
            outcome[1] += 1
            return outcome[0]

        put = self._table.put if stored else self._table.alter
        for key in change.keys:
            put(key, replace)
        for old, (new, blocks) in outcomes.items():
            sets.use(new, blocks - 1)
            sets.use(old, -blocks - 1)

    def _without(self, gone: int) -> Callable[[int], int]:
        sets = self._sets

        def replace(old: int) -> int:
            left = sets[old] & ~gone
            if left == sets[old]:
                return old
            new = sets.id_of(left)
            sets.use(new, 1)
            sets.use(old, -1)
            return new

        return replace


def _stale_message(source: Source, life: _Life | None) -> str:
    attached = "no life of it is attached" if life is None else f"epoch {life.epoch} is attached"
    return f"epoch {source.epoch} of {source.instance} may not write: {attached}"
