"""Runs that several rows of the evaluation look at, each made once."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

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


class _Run(NamedTuple):
    """What one simulation needs to know."""

    folder: Path
    name: str
    spec: ClusterSpec
    speed: float
    jittered: bool
    outputs: int
    seed: int


class Traces:
    """The published traces, and runs on them.

    Args:
        folder: where they lie.
        seeds: of the runs; figures are medians over them.
        jobs: processes that simulate at once.
        on_run: called for each run that has ended.
    """

    def __init__(
        self,
        folder: Path,
        seeds: Sequence[int],
        jobs: int = 1,
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.seeds = seeds
        self._on_run = on_run
        self._pool = None
        if jobs > 1:
            # Started afresh: nothing of this process is shared, not even the order of its sets.
            self._pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        self.runs = cache(self._runs)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown()

    def forget(self) -> None:
        """Forget the runs: thousands of requests each, they would fill the memory."""
        self.runs.cache_clear()

    def trace(self, name: str, outputs: int = 1) -> list[Request]:
        """A published trace; `outputs` times as long answers."""
        return _trace(self.folder, name, outputs)

    def _runs(
        self,
        name: str,
        spec: ClusterSpec,
        speed: float = 1.0,
        jittered: bool = False,
        once: bool = False,
        outputs: int = 1,
    ) -> list[Result]:
        runs = [
            _Run(self.folder, name, spec, speed, jittered, outputs, seed)
            for seed in (self.seeds[:1] if once else self.seeds)
        ]
        results = []
        for result in self._pool.map(_simulated, runs) if self._pool else map(_simulated, runs):
            results.append(result)
            self._on_run()
        return results

    def mean_ttft_s(self, name: str, spec: ClusterSpec, speed: float = 1.0, jittered: bool = False) -> float:
        """Median over the seeds of the mean time to first token."""
        return median(self.mean_ttfts_s(name, spec, speed, jittered))

    def mean_ttfts_s(
        self, name: str, spec: ClusterSpec, speed: float = 1.0, jittered: bool = False
    ) -> list[float]:
        """The mean time to first token, seed by seed."""
        return [run.mean_ttft_s for run in self.runs(name, spec, speed, jittered)]

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


@cache
def _trace(folder: Path, name: str, outputs: int) -> list[Request]:
    trace = read_trace(folder / f"{name}_trace.jsonl")
    if outputs == 1:
        return trace
    return [msgspec.structs.replace(each, output_length=each.output_length * outputs) for each in trace]


def _simulated(run: _Run) -> Result:
    trace = _trace(run.folder, run.name, run.outputs)
    if run.jittered:
        trace = jitter(trace, TICK_MS, run.seed)
    return simulate(run.spec, trace, speed=run.speed, seed=run.seed)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def placed(policy: str, prefill: int, decode: int) -> ClusterSpec:
    """A cluster that only places: nothing is refused. Local caches only where the policy knows no others."""
    return ClusterSpec(prefill, decode, policy=policy, fetch="none" if policy == "cache-aware" else "peer")


def stalling(spec: ClusterSpec) -> ClusterSpec:
    """The same, where a batch waits while a newcomer's KV comes in."""
    return replace(spec, join_load_bytes_per_s=JOIN_LOAD_BYTES_PER_S)


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
