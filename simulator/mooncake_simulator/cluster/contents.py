"""What a store keeps in DRAM, by five rules: the three of the paper's comparison, and the Conductor's two.

LRU, LFU and LengthAware are those of arXiv 2407.00079, Table 1. All of them take a block into DRAM when it is
computed or read from SSD, and none of the three reads ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, Protocol, TypeAlias

from mooncake_scheduler.conductor.tiering import (
    KEEP_EVERY_S,
    STEERED_SHARE,
    Planner,
    Promotion,
    Session,
    Sessions,
)

Rule: TypeAlias = Literal["lru", "lfu", "length-aware", "predicted", "steered"]


class Contents(Protocol):
    """The blocks in DRAM."""

    def holds(self, block: int) -> bool:
        """Whether a block is in DRAM."""

    def turn(self, blocks: Sequence[int], now_s: float) -> Session | None:
        """A prompt came; what it is known by until it is stored."""

    def stored(self, blocks: Sequence[int], session: Session | None, now_s: float) -> None:
        """A prompt's blocks are in DRAM now, and were used."""

    def dropped(self, blocks: Sequence[int]) -> None:
        """The store holds these no longer at all."""


class LeastRecentlyUsed:
    """What was used longest ago goes first; of one prompt, its end."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: dict[int, None] = {}

    def holds(self, block: int) -> bool:
        return block in self._blocks

    def turn(self, blocks: Sequence[int], now_s: float) -> Session | None:
        return None

    def stored(self, blocks: Sequence[int], session: Session | None, now_s: float) -> None:
        held = self._blocks
        for block in reversed(blocks):
            held.pop(block, None)
            held[block] = None
        while len(held) > self._capacity:
            del held[next(iter(held))]

    def dropped(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)


class LeastFrequentlyUsed:
    """What was used most rarely since it came goes first.

    Args:
        capacity_blocks: that fit.
        by_position: of those used equally often, the one latest in its prompt goes first (LengthAware),
            else the one used longest ago.
    """

    def __init__(self, capacity_blocks: int, *, by_position: bool = False) -> None:
        self._capacity = capacity_blocks
        self._by_position = by_position
        self._uses: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._clock = 0

    def holds(self, block: int) -> bool:
        return block in self._uses

    def turn(self, blocks: Sequence[int], now_s: float) -> Session | None:
        return None

    def stored(self, blocks: Sequence[int], session: Session | None, now_s: float) -> None:
        uses, heap = self._uses, self._heap
        for position, block in reversed(list(enumerate(blocks))):
            self._clock += 1
            times = uses[block][0] + 1 if block in uses else 1
            rank = uses[block] = (times, -position if self._by_position else self._clock)
            heappush(heap, (rank, block))
        while len(uses) > self._capacity:
            rank, block = heappop(heap)
            if uses.get(block) == rank:
                del uses[block]

    def dropped(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._uses.pop(block, None)


class Predicted:
    """The Conductor's own: by what is expected of each session (conductor/tiering)."""

    def __init__(self, capacity_blocks: int) -> None:
        self.planner = Planner(Sessions(), capacity_blocks)

    def holds(self, block: int) -> bool:
        return self.planner.holds(block)

    def turn(self, blocks: Sequence[int], now_s: float) -> Session | None:
        return self.planner.turn(blocks, "default", now_s) if blocks else None

    def stored(self, blocks: Sequence[int], session: Session | None, now_s: float) -> None:
        if session is not None:
            self.planner.stored(session, now_s)

    def dropped(self, blocks: Sequence[int]) -> None:
        self.planner.dropped(blocks)

    def arrived(self, promotion: Promotion, now_s: float) -> None:
        """What was read ahead is in DRAM."""
        self.planner.arrived(promotion, now_s)

    def keep(self, now_s: float) -> None:
        """Time passes: see to it that what shall stay does."""


class Steered(Predicted):
    """The Conductor's over a store that takes no orders and drops what was read longest ago.

    As it drives a real store (`tiering.following`): what shall stay is read now and then.

    Args:
        capacity_blocks: that fit.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(int(STEERED_SHARE * capacity_blocks))
        self._dram = LeastRecentlyUsed(capacity_blocks)

    def holds(self, block: int) -> bool:
        return self._dram.holds(block)

    def stored(self, blocks: Sequence[int], session: Session | None, now_s: float) -> None:
        super().stored(blocks, session, now_s)
        self._dram.stored(blocks, session, now_s)

    def dropped(self, blocks: Sequence[int]) -> None:
        super().dropped(blocks)
        self._dram.dropped(blocks)

    def arrived(self, promotion: Promotion, now_s: float) -> None:
        super().arrived(promotion, now_s)
        self._dram.stored(promotion.keys, None, now_s)

    def keep(self, now_s: float) -> None:
        for session in self.planner.unread(now_s, KEEP_EVERY_S):
            there = [key for key in session.keys[: session.warm] if self._dram.holds(key)]
            self._dram.stored(there, None, now_s)


def contents_of(rule: Rule, capacity_blocks: int) -> Contents:
    """An empty DRAM under one of the rules."""
    if rule == "lru":
        return LeastRecentlyUsed(capacity_blocks)
    if rule == "predicted":
        return Predicted(capacity_blocks)
    if rule == "steered":
        return Steered(capacity_blocks)
    return LeastFrequentlyUsed(capacity_blocks, by_position=rule == "length-aware")
