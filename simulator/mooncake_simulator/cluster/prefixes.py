"""What prefill instances hold of a prompt, and from where each would fetch the rest."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_core.ledger import InstanceLoad
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.model import InstanceView
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.links import Link
from mooncake_simulator.cluster.residency import Residency
from mooncake_simulator.cluster.tiers import TieredStore
from mooncake_simulator.workloads.traces import BLOCK_TOKENS

NOBODY = -1
"""Number of the holder where there is none to fetch from."""


class Prefix:
    """Of one prompt at one moment.

    Args:
        held: blocks from the start that each instance holds or was promised, the store last.
        source: number of the holder to fetch from; that of the store is the number of instances.
        depth: blocks that it has; 0 = nobody fetches.
        leaving: transfers that leave it already.
        cold: for each depth, how many of its blocks before that lie on SSD alone; empty = none do.
    """

    __slots__ = ("_cold", "_depth", "_leaving", "_source", "held")

    def __init__(
        self, held: Sequence[int], source: int, depth: int, leaving: int, cold: Sequence[int] = ()
    ) -> None:
        self.held = held
        self._source = source
        self._depth = depth
        self._leaving = leaving
        self._cold = cold

    def source(self, number: int) -> int:
        """Of which holder an instance would fetch; `NOBODY` where none has more than itself."""
        return self._source if self.held[number] < self._depth else NOBODY

    def view(self, number: int, instance: Instance, load: InstanceLoad, entering: int) -> InstanceView:
        """An instance as the prompt finds it, with so many transfers that enter it already."""
        held, depth, cold = self.held[number], self._depth, self._cold
        fetches = held < depth
        return InstanceView(
            instance,
            load,
            held * BLOCK_TOKENS,
            (depth if fetches else held) * BLOCK_TOKENS,
            (cold[-1] - cold[min(held, len(cold) - 1)]) * BLOCK_TOKENS if cold else 0,
            entering,
            self._leaving if fetches else 0,
        )


class Prefixes:
    """Looks prompts up.

    Args:
        spec: the cluster.
        residency: who holds what.
        senders: for each instance, what leaves it.
        tiers: of the store, where it has some.
    """

    def __init__(
        self, spec: ClusterSpec, residency: Residency, senders: Sequence[Link], tiers: TieredStore | None
    ) -> None:
        self._spec = spec
        self._residency = residency
        self._senders = senders
        self._tiers = tiers

    def of(self, blocks: Sequence[int], now_s: float) -> Prefix:
        """What is known of a prompt's prefix."""
        held = self._residency.promised_depths(blocks)
        if self._spec.fetch == "none":
            return Prefix(held, NOBODY, 0, 0)
        present = self._residency.present_depths(blocks)
        if self._spec.fetch == "peer":
            source = self._deepest(present, now_s)
            return Prefix(held, source, present[source], self._senders[source].flows(now_s))
        # The store is the last holder.
        source = self._spec.prefill
        depth = present[source]
        cold = () if self._tiers is None else self._tiers.cold_blocks(blocks[:depth])
        return Prefix(held, source, depth, 0, cold)

    def _deepest(self, present: Sequence[int], now_s: float) -> int:
        """The best to fetch from: of those that hold most, the one with the fewest transfers leaving it."""
        most = max(present)
        deepest = [number for number, depth in enumerate(present) if depth == most]
        if len(deepest) == 1 or not most:
            return deepest[0]
        return min(deepest, key=lambda number: self._senders[number].flows(now_s))
