"""Which instance holds which blocks: a least-recently-used cache for each, and who holds a prefix how far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

_NEW = object()


class Residency:
    """The caches of several instances, by their number from 0.

    An instance counts on a block from the moment it was promised (a request that computes or fetches it is
    in its queue); others can fetch it only once it is there. As bit masks by block, so that a walk along a
    prefix asks all instances at once.

    Args:
        capacities_blocks: of each instance; None = without end.
    """

    def __init__(self, capacities_blocks: Sequence[int | None]) -> None:
        self._capacities = list(capacities_blocks)
        self._held: list[dict[int, None]] = [{} for _ in capacities_blocks]
        self._promised: dict[int, int] = {}
        self._present: dict[int, int] = {}
        self.evictions = 0

    def promised_depths(self, blocks: Sequence[int]) -> list[int]:
        """For each instance, the blocks from the start that it holds or has been promised."""
        return self._depths(self._promised, blocks)

    def present_depths(self, blocks: Sequence[int]) -> list[int]:
        """For each instance, the blocks from the start that are there."""
        return self._depths(self._present, blocks)

    def promised_depth(self, instance: int, blocks: Sequence[int]) -> int:
        """The blocks from the start that one instance holds or has been promised."""
        held = self._held[instance]
        return next((depth for depth, block in enumerate(blocks) if block not in held), len(blocks))

    def promise(self, instance: int, blocks: Sequence[int]) -> Sequence[int]:
        """Blocks will be there, and were used just now; what was used longest ago makes room.

        The end of a prefix goes before its start: a block is of no use without those before it.

        Returns:
            The blocks that made room.
        """
        held, bit, promised = self._held[instance], 1 << instance, self._promised
        for block in reversed(blocks):
            if held.pop(block, _NEW) is _NEW:
                promised[block] = promised.get(block, 0) | bit
            held[block] = None
        capacity = self._capacities[instance]
        if capacity is None or len(held) <= capacity:
            return ()
        left = list(islice(held, len(held) - capacity))
        self._forget(instance, left)
        self.evictions += len(left)
        return left

    def arrive(self, instance: int, blocks: Sequence[int]) -> None:
        """Blocks that were promised are there now; those that had to make room meanwhile are not."""
        held, bit, present = self._held[instance], 1 << instance, self._present
        for block in blocks:
            if block in held:
                present[block] = present.get(block, 0) | bit

    def clear(self, instance: int) -> None:
        """The instance has lost all it held."""
        self._forget(instance, list(self._held[instance]))

    def holders(self, block: int, instances: int | None = None) -> int:
        """How many instances have a block, of the first so many or of all."""
        held = self._present.get(block, 0)
        return (held if instances is None else held & ((1 << instances) - 1)).bit_count()

    def _forget(self, instance: int, blocks: Sequence[int]) -> None:
        held, others = self._held[instance], ~(1 << instance)
        for block in blocks:
            del held[block]
        for masks in (self._promised, self._present):
            for block in blocks:
                left = masks.pop(block, 0) & others
                if left:
                    masks[block] = left

    def _depths(self, masks: dict[int, int], blocks: Sequence[int]) -> list[int]:
        count = len(self._capacities)
        depths = [0] * count
        live = (1 << count) - 1
        get = masks.get
        for depth, block in enumerate(blocks):
            held = get(block, 0) & live
            if held != live:
                lost = live ^ held
                while lost:
                    lowest = lost & -lost
                    depths[lowest.bit_length() - 1] = depth
                    lost ^= lowest
                live = held
                if not live:
                    return depths
        whole = len(blocks)
        while live:
            lowest = live & -live
            depths[lowest.bit_length() - 1] = whole
            live ^= lowest
        return depths
