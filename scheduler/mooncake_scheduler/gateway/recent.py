"""What was dispatched a moment ago and no engine has reported yet. A request costs O(1), whatever its length.

Block keys are chained, so two prompts share exactly the blocks before the first key in which they differ,
and that place is found by bisection. Recent prompts are kept by their first key: only those can share
anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from mooncake_core.index import Depth

MOST_ALIKE = 32
"""Recent prompts with the same first block that are looked at: of more, the latest."""
_NOTHING = Depth(0, 0, 0)


class _Dispatch(NamedTuple):
    until_s: float
    instance: str
    keys: Sequence[int]


def common_blocks(one: Sequence[int], other: Sequence[int], known: int = 0) -> int:
    """Blocks that two prompts share, by their chained keys; the first `known` are the same for sure."""
    low, high = known, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


class RecentDispatches:
    """Prompts believed to be held by the instance they were sent to, for a short time."""

    def __init__(self) -> None:
        self._by_first: dict[int, deque[_Dispatch]] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap: one that is believed for long must not keep those behind it."""

    def __len__(self) -> int:
        """Dispatches remembered, those included whose end nobody has noticed yet."""
        return sum(len(alike) for alike in self._by_first.values())

    def add(self, instance: str, keys: Sequence[int], until_s: float, now_s: float) -> None:
        """Believe until `until_s` that the instance holds the prompt."""
        self._expire(now_s)
        if not keys:
            return
        first = keys[0]
        alike = self._by_first.get(first)
        if alike is None:
            alike = self._by_first[first] = deque(maxlen=MOST_ALIKE)
        alike.append(_Dispatch(until_s, instance, keys))
        heappush(self._ends, (until_s, first))

    def merge(self, keys: Sequence[int], found: Mapping[str, Depth], now_s: float) -> Mapping[str, Depth]:
        """What the index found for these keys, deepened by what is believed."""
        alike = self._by_first.get(keys[0]) if keys else None
        if alike is None:
            return found
        merged = dict(found)
        length = len(keys)
        for until_s, instance, held in alike:
            depth = merged.get(instance, _NOTHING)
            known = depth.hbm
            # One look tells whether this one goes deeper: the key after the known ones stands for them all.
            if until_s < now_s or known >= length or known >= len(held) or held[known] != keys[known]:
                continue
            blocks = common_blocks(keys, held, known + 1)
            merged[instance] = Depth(blocks, max(blocks, depth.dram), max(blocks, depth.ssd))
        return merged

    def forget(self, instance: str) -> None:
        """The instance ended or cleared its cache: nothing is believed of it any more."""
        for first, alike in self._by_first.items():
            if any(each.instance == instance for each in alike):
                left = (each for each in alike if each.instance != instance)
                self._by_first[first] = deque(left, maxlen=MOST_ALIKE)

    def _expire(self, now_s: float) -> None:
        ends = self._ends
        while ends and ends[0][0] < now_s:
            first = heappop(ends)[1]
            alike = self._by_first.get(first)
            while alike and alike[0].until_s < now_s:
                alike.popleft()
            if alike is not None and not alike:
                del self._by_first[first]
