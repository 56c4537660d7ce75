"""The cheapest pair of pools, found with few tries; what a try is, the caller says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple


class Size(NamedTuple):
    """Instances of both pools."""

    prefill: int
    decode: int

    def covers(self, other: Size) -> bool:
        """Whether it has at least as many instances of each kind."""
        return self.prefill >= other.prefill and self.decode >= other.decode


@dataclass(frozen=True, slots=True)
class Prices:
    """What an instance costs for an hour."""

    prefill: float
    decode: float

    def of(self, size: Size) -> float:
        """What all instances of a size cost for an hour."""
        return size.prefill * self.prefill + size.decode * self.decode


class NoSizeError(Exception):
    """Neither does the largest size do, nor one with fewer prefill instances."""


def cheapest(
    does: Callable[[Size], bool],
    prices: Prices,
    *,
    least: Size,
    most: Size,
    allowed: Callable[[Size], bool] = lambda size: True,
) -> Size:
    """The cheapest size that does, with one instance fewer on either side tried and found too small.

    More instances are taken to be no worse: a size that fails rules out all that are smaller on both sides.
    The least of each side is found by halving, with the most of the other; where both at once are too few,
    the fewest decode instances are found for each count of prefill instances, as far as it can be cheaper,
    and the cheapest of these pairs is taken. Where more instances do harm (a prefill pool that grows hands
    decode more), the sizes next to the one found are tried all the same, and one that does is taken; and
    where the largest size fails, half of its prefill instances are tried, and half of those.

    Args:
        does: whether a size keeps the SLO; asked at most once for each.
        prices: of the instances; above 0.
        least: sizes below it are known not to do.
        most: sizes above it are not tried.
        allowed: whether a size may be chosen at all.

    Raises:
        NoSizeError: no allowed size up to `most` does.
    """
    tried: dict[Size, bool] = {}

    def holds(size: Size) -> bool:
        if size not in tried:
            tried[size] = does(size)
        return tried[size]

    may_be_chosen = cache(allowed)
    found = next((size for size in _fewer_prefill(least, most) if holds(size)), None)
    if found is None:
        raise NoSizeError
    most = found
    prefill = fewest(lambda count: holds(Size(count, most.decode)), least.prefill, most.prefill)
    decode = fewest(lambda count: holds(Size(most.prefill, count)), least.decode, most.decode)
    corner = Size(prefill, decode)
    enough = [corner] if holds(corner) else list(_staircase(holds, prices, corner, most, may_be_chosen))
    for size in _by_price(corner, most, prices):
        if any(size.covers(each) for each in enough) and may_be_chosen(size) and holds(size):
            return _smallest(size, holds, prices, may_be_chosen)
    raise NoSizeError


def _fewer_prefill(least: Size, most: Size) -> Iterator[Size]:
    """The largest size, and it with half of its prefill instances, again and again down to the least."""
    prefill = most.prefill
    while prefill > least.prefill:
        yield Size(prefill, most.decode)
        prefill = max(least.prefill, prefill // 2)
    yield Size(prefill, most.decode)


def _staircase(
    holds: Callable[[Size], bool],
    prices: Prices,
    least: Size,
    most: Size,
    allowed: Callable[[Size], bool],
) -> Iterator[Size]:
    """For each count of prefill instances the fewest decode instances, while that can be the cheapest."""
    cheapest_so_far = inf
    decode = fewest(lambda count: holds(Size(least.prefill, count)), least.decode, most.decode)
    for prefill in range(least.prefill, most.prefill + 1):
        if prices.of(Size(prefill, least.decode)) >= cheapest_so_far:
            return
        while decode > least.decode and holds(Size(prefill, decode - 1)):
            decode -= 1
        yield (size := Size(prefill, decode))
        if allowed(size):
            cheapest_so_far = min(cheapest_so_far, prices.of(size))


def fewest(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The smallest count that holds; `most` where none below does, which is not asked."""
    while least < most:
        middle = (least + most) // 2
        if holds(middle):
            most = middle
        else:
            least = middle + 1
    return most


def _by_price(least: Size, most: Size, prices: Prices) -> Iterator[Size]:
    sizes = [
        Size(prefill, decode)
        for prefill in range(least.prefill, most.prefill + 1)
        for decode in range(least.decode, most.decode + 1)
    ]
    # Of one price the one with fewer instances; then the one whose pools are less unlike.
    yield from sorted(sizes, key=lambda s: (prices.of(s), sum(s), abs(s.prefill - s.decode)))


def _smallest(
    size: Size, holds: Callable[[Size], bool], prices: Prices, allowed: Callable[[Size], bool]
) -> Size:
    """A size from which no instance can be taken."""
    while True:
        fewer = [
            each
            for each in (Size(size.prefill - 1, size.decode), Size(size.prefill, size.decode - 1))
            if min(each) > 0 and allowed(each) and holds(each)
        ]
        if not fewer:
            return size
        size = min(fewer, key=prices.of)
