"""What was dispatched a moment ago and the engines have not reported yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from mooncake_core.index.contract import Depth


class SpeculativeOverlay:
    """Blocks that an instance is about to hold, believed for a short time; one for each scheduler process.

    An engine reports a block only after it was computed; until then, requests of the same prefix would not
    see each other. Entries are merged into what the index knows, and end by themselves: a wrong guess costs
    little.

    Args:
        max_blocks: bound on (instance, block) pairs; beyond, those that would end first are dropped.
    """

    def __init__(self, max_blocks: int = 262_144) -> None:
        self._max_blocks = max_blocks
        self._blocks = 0
        self._expires: dict[int, dict[str, float]] = {}
        self._ends: list[tuple[float, int, str, Sequence[int]]] = []
        self._added = 0

    def __len__(self) -> int:
        """(instance, block) pairs held, those included whose end nobody has noticed yet."""
        return self._blocks

    def add(
        self, instance: str, keys: Sequence[int], expires_at_s: float, now_s: float, *, from_block: int = 0
    ) -> None:
        """Believe until `expires_at_s` that the instance holds the prefix.

        Args:
            instance: whose HBM it is.
            keys: the whole prompt's block keys.
            expires_at_s: on the caller's clock, as `now_s`.
            now_s: the time.
            from_block: blocks before this one are known to the index already, and need not be entered.
        """
        added = keys[from_block:]
        for key in added:
            holders = self._expires.setdefault(key, {})
            known = holders.get(instance)
            self._blocks += known is None
            holders[instance] = expires_at_s if known is None else max(known, expires_at_s)
        self._added += 1
        heappush(self._ends, (expires_at_s, self._added, instance, added))
        self.expire(now_s)
        while self._blocks > self._max_blocks and self._ends:
            self._end(heappop(self._ends))

    def forget(self, instance: str) -> None:
        """The instance ended or cleared its cache: nothing is believed of it any more."""
        for key in [key for key, holders in self._expires.items() if instance in holders]:
            self._drop(key, instance)

    def expire(self, now_s: float) -> None:
        """End what is due."""
        while self._ends and self._ends[0][0] <= now_s:
            self._end(heappop(self._ends))

    def merge(self, keys: Sequence[int], matched: Mapping[str, Depth], now_s: float) -> dict[str, Depth]:
        """What the index matched for these keys, deepened by what is believed."""
        merged = dict(matched)
        self.expire(now_s)
        if not self._expires or not keys:
            return merged
        for instance in set(self._expires.get(keys[0], ())) | matched.keys():
            depth = merged.get(instance, Depth(0, 0, 0))
            believed = self._depth(instance, keys, depth.hbm)
            if believed > depth.hbm:
                merged[instance] = Depth(believed, max(believed, depth.dram), max(believed, depth.ssd))
        return merged

    def _depth(self, instance: str, keys: Sequence[int], known: int) -> int:
        """Blocks from the start that are held when the first `known` are."""
        low, high = known, len(keys)
        if low >= high or instance not in self._expires.get(keys[low], ()):
            return known
        while high - low > 1:
            middle = (low + high) // 2
            if instance in self._expires.get(keys[middle], ()):
                low = middle
            else:
                high = middle
        return low + 1

    def _end(self, entry: tuple[float, int, str, Sequence[int]]) -> None:
        expires_at_s, _, instance, keys = entry
        for key in keys:
            known = self._expires.get(key, {}).get(instance)
            if known is not None and known <= expires_at_s:
                self._drop(key, instance)

    def _drop(self, key: int, instance: str) -> None:
        holders = self._expires[key]
        del holders[instance]
        self._blocks -= 1
        if not holders:
            del self._expires[key]
