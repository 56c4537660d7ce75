"""What was simulated on the way to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import Request, jitter
from mooncakectl.plan.search import Prices, Size
from mooncakectl.plan.slo import Kept, Objectives, kept, missed, worst


@dataclass(frozen=True, slots=True)
class Try:
    """One size and what it kept."""

    size: Size
    price: float
    kept: Kept
    missed: str
    """Empty where the SLO was kept."""

    def document(self) -> dict[str, Any]:
        """For machines. Shares of all requests, the worst of the seeds."""
        return {
            "prefill": self.size.prefill,
            "decode": self.size.decode,
            "cost_per_hour": self.price,
            "ttft_kept": self.kept.ttft,
            "tbt_kept": self.kept.tbt,
            "refused": self.kept.refused,
            "keeps_slo": not self.missed,
        }


class Trial:
    """Simulates sizes, and remembers what they kept.

    Args:
        spec: the cluster, of whatever size.
        trace: the requests, by arrival.
        objectives: what has to be kept, with every seed.
        prices: of the instances.
        speed: trace seconds a second.
        seeds: of the runs; the first that breaks the SLO is the last that is run.
        jitter_ms: over how many milliseconds arrivals are spread.
        on_size: called with each size before it is simulated.
        on_arrival: called for each request that arrives.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        trace: Sequence[Request],
        objectives: Objectives,
        prices: Prices,
        *,
        speed: float,
        seeds: Sequence[int],
        jitter_ms: float = 0.0,
        on_size: Callable[[Size], None] = lambda size: None,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        self.tries: list[Try] = []
        self._spec = spec
        self._trace = trace
        self._objectives = objectives
        self._prices = prices
        self._speed = speed
        self._seeds = seeds
        self._jitter_ms = jitter_ms
        self._on_size = on_size
        self._on_arrival = on_arrival

    def __call__(self, size: Size) -> bool:
        """Whether a size keeps the SLO."""
        self._on_size(size)
        spec = self._spec.resized(size.prefill, size.decode)
        runs: list[Kept] = []
        for seed in self._seeds:
            trace = jitter(self._trace, self._jitter_ms, seed) if self._jitter_ms else self._trace
            result = simulate(spec, trace, speed=self._speed, seed=seed, on_arrival=self._on_arrival)
            runs.append(kept(result, self._objectives))
            if not runs[-1].keeps(self._objectives):
                break
        found = worst(runs)
        said = missed(found, self._objectives)
        self.tries.append(Try(size, self._prices.of(size), found, said))
        return not said
