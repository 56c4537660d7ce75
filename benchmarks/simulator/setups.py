"""Runs that several rows of the evaluation look at, each made once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.outcome import Result
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import BLOCK_TOKENS, Request, jitter, read_trace

TICK_MS = 3_000
"""The conversation trace was recorded in ticks of 3 s; jittered over one, it becomes what was sent."""
JOIN_LOAD_BYTES_PER_S = 30e9
"""Fitted once, to the mean TBT of FAST'25 Fig. 15; no other row may change it."""


class Traces:
    """The published traces, and runs on them.

    Args:
        folder: where they lie.
        seeds: of the runs; figures are medians over them.
    """

    def __init__(self, folder: Path, seeds: Sequence[int]) -> None:
        self._folder = folder
        self._seeds = seeds
        self.trace = cache(self._trace)
        self.runs = cache(self._runs)

    def _trace(self, name: str) -> list[Request]:
        return read_trace(self._folder / f"{name}_trace.jsonl")

    def _runs(
        self, name: str, spec: ClusterSpec, speed: float = 1.0, jittered: bool = False, once: bool = False
    ) -> list[Result]:
        trace = self.trace(name)
        return [
            simulate(spec, jitter(trace, TICK_MS, seed) if jittered else trace, speed=speed, seed=seed)
            for seed in (self._seeds[:1] if once else self._seeds)
        ]

    def mean_ttft_s(self, name: str, spec: ClusterSpec, speed: float = 1.0, jittered: bool = False) -> float:
        """Median over the seeds of the mean time to first token."""
        return median([run.mean_ttft_s for run in self.runs(name, spec, speed, jittered)])

    def floor_s(self, name: str) -> float:
        """Mean prefill seconds with an endless cache and no queue: no placing of whole prompts beats it."""
        model = CostModel.from_profile(LLAMA3_70B_A800)
        seen: set[int] = set()
        total_s = 0.0
        trace = self.trace(name)
        for request in trace:
            held = next((at for at, block in enumerate(request.hash_ids) if block not in seen), None)
            cached = request.input_length if held is None else held * BLOCK_TOKENS
            total_s += model.prefill_s(request.input_length, min(cached, request.input_length - 1))
            seen.update(request.hash_ids)
        return total_s / len(trace)


def placed(policy: str, prefill: int, decode: int) -> ClusterSpec:
    """A cluster that only places: nothing is refused. Local caches only where the policy knows no others."""
    return ClusterSpec(prefill, decode, policy=policy, fetch="none" if policy == "cache-aware" else "peer")


def timed(do: Callable[[], object]) -> float:
    """Processor seconds that something takes."""
    began_s = time.process_time()
    do()
    return time.process_time() - began_s


def admitted(mode: AdmissionMode, prefill: int, decode: int) -> ClusterSpec:
    """The overload set-up of the papers: 30 s to the first token, 100 ms between tokens."""
    return ClusterSpec(
        prefill, decode, policy="kv-centric", admission=mode, ttft_target_s=30.0, tbt_target_s=0.1
    )
