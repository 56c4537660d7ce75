"""Finding where a prefix ends without looking at every block of it.

A cache that frees a sequence from its tail holds prefixes without holes, so what is held only shrinks along
a prompt. The search looks at the first block, halves the intervals whose two ends differ, deepest part first,
and leaves out those whose ends agree: about log2(blocks) looks for each distinct depth. Because stores do
free blocks in the middle, it then looks at a few more places at random and narrows down again where it finds
a hole.

`lua/match.lua` is the same search where Redis is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

WALK_BLOCKS = 64
"""Prefixes of at most so many blocks are walked block by block: exact, and as cheap."""


class Drop(NamedTuple):
    """Bits that are set in every block looked at before `depth`, and not beyond."""

    bits: int
    depth: int


class Found(NamedTuple):
    """What a search found: every bit of the first block appears in one drop."""

    drops: list[Drop]
    looks: int
    hole: bool


def gallop(length: int, held: Callable[[int], int], checks: Sequence[float]) -> Found:
    """Find for each bit how many blocks from the start have it.

    Exact where no bit comes back after it was gone. With holes the depth is at least the true one, and the
    block before it is held.

    Args:
        length: blocks of the prefix, at least 1.
        held: the bits of the block at a position.
        checks: places to look at for holes, as fractions (0..1) of the depth found.
    """
    seen = {0: held(0)}

    def narrow(low: int, at_low: int, high: int) -> None:
        pending = [(low, at_low, high)]
        while pending:
            low, at_low, high = pending.pop()
            if high - low > 1 and at_low & ~seen.get(high, 0):
                middle = (low + high) // 2
                seen[middle] = held(middle)
                pending.append((low, at_low, middle))
                pending.append((middle, at_low & seen[middle], high))

    if length <= WALK_BLOCKS:
        left = seen[0]
        for position in range(1, length):
            if not left:
                break
            seen[position] = held(position)
            left &= seen[position]
        return _conclude(seen)

    narrow(0, seen[0], length)
    deepest = max((drop.depth for drop in _conclude(seen).drops), default=0)
    for fraction in checks:
        position = int(fraction * deepest)
        if position in seen:
            continue
        before = max(p for p in seen if p < position)
        seen[position] = held(position)
        narrow(before, seen[before], position)
    return _conclude(seen)


def _conclude(seen: dict[int, int]) -> Found:
    left = seen[0]
    drops: list[Drop] = []
    hole = False
    previous = 0
    for position in sorted(seen):
        lost = left & ~seen[position]
        if lost:
            drops.append(Drop(lost, previous + 1))
            left ^= lost
        hole = hole or bool(seen[position] & seen[0] & ~left)
        previous = position
    if left:
        drops.append(Drop(left, previous + 1))
    return Found(drops, len(seen), hole)
