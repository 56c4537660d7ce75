"""How many instances hold the popular blocks, over time (FAST'25 Fig. 11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.residency import Residency
from mooncake_simulator.workloads.traces import Request

RANKS = (10, 100, 1_000)
"""Places in the order of how often blocks occur in the trace, as the paper shows them."""
_SAMPLES = 120


@dataclass(frozen=True, slots=True)
class Replicas:
    """Prefill instances that hold a block, sampled evenly from the first arrival to the last."""

    every_s: float
    holders: dict[int, list[int]] = field(default_factory=dict)
    """By the block's rank; ranks that the trace does not have are not there."""


class ReplicaWatch:
    """Looks at the caches from time to time.

    Args:
        agenda: the time.
        residency: who holds what.
        instances: prefill instances; those of higher numbers in the residency do not count.
        requests: the trace.
        last_s: its last arrival.
    """

    def __init__(
        self,
        agenda: Agenda,
        residency: Residency,
        instances: int,
        requests: Sequence[Request],
        last_s: float,
    ) -> None:
        self._residency = residency
        self._instances = instances
        used = chain.from_iterable([request.hash_ids for request in requests])
        often = Counter(used).most_common(RANKS[-1])
        self._blocks = {rank: often[rank - 1][0] for rank in RANKS if rank <= len(often)}
        self.seen = Replicas(last_s / _SAMPLES, {rank: [] for rank in self._blocks})
        for sample in range(1, _SAMPLES + 1):
            agenda.at(sample * self.seen.every_s, self._look)

    def _look(self) -> None:
        for rank, block in self._blocks.items():
            self.seen.holders[rank].append(self._residency.holders(block, self._instances))
