"""Who holds a block, as one number; and a table in which equal holder sets are stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mooncake_core.index.contract import Depth, Tier
from mooncake_core.index.gallop import Drop

_LANE_BITS = 3


def holding(slot: int, tier: Tier) -> int:
    """The bits of one slot that holds a block in `tier`. A holder set is the union of such bits."""
    return int(tier) << (_LANE_BITS * slot)


def lanes(slots: Iterable[int]) -> int:
    """All bits of the given slots."""
    mask = 0
    for slot in slots:
        mask |= 0b111 << (_LANE_BITS * slot)
    return mask


def cumulative(holders: int, live: int) -> int:
    """For the slots in `live`, the bits (by HBM, by HBM or DRAM, by any tier) in place of the tiers.

    A deeper tier's bit is thus set wherever a nearer one's is, and `&` along a prefix is the depth rule.
    """
    holders &= live
    lowest = live // 0b111
    hbm = holders & lowest
    dram = (holders | holders >> 1) & lowest
    ssd = (holders | holders >> 1 | holders >> 2) & lowest
    return hbm | dram << 1 | ssd << 2


def depths_by_slot(drops: Iterable[Drop]) -> Iterator[tuple[int, Depth]]:
    """The outcome of a search over `cumulative` bits, by slot."""
    by_slot: dict[int, list[int]] = {}
    for bits, depth in drops:
        while bits:
            slot, tier = divmod((bits & -bits).bit_length() - 1, _LANE_BITS)
            by_slot.setdefault(slot, [0, 0, 0])[tier] = depth
            bits &= bits - 1
    for slot, (hbm, dram, ssd) in by_slot.items():
        yield slot, Depth(hbm, dram, ssd)


class HolderSets:
    """Holder sets, each stored once under a small id however many blocks share it. Id 0 is the empty set."""

    def __init__(self) -> None:
        self._sets: list[int] = [0]
        self._uses: list[int] = [1]
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []

    def __getitem__(self, set_id: int) -> int:
        return self._sets[set_id]

    def __len__(self) -> int:
        return len(self._ids) - 1

    def id_of(self, holders: int) -> int:
        """The id of a set. It stays valid once `use` counted it; until then only till the next `use`."""
        set_id = self._ids.get(holders)
        if set_id is None:
            if self._free:
                set_id = self._free.pop()
                self._sets[set_id] = holders
            else:
                set_id = len(self._sets)
                self._sets.append(holders)
                self._uses.append(0)
            self._ids[holders] = set_id
        return set_id

    def use(self, set_id: int, blocks: int) -> None:
        """So many more blocks (or fewer, where negative) have this set; one that none has is forgotten."""
        if not set_id:
            return
        self._uses[set_id] += blocks
        if not self._uses[set_id]:
            del self._ids[self._sets[set_id]]
            self._sets[set_id] = 0
            self._free.append(set_id)
