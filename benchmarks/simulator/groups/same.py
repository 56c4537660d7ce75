"""The same seed gives the same result to the bit, and memory does not grow with time."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from rows import Row
from setups import Traces, admitted

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_simulator.cluster.outcome import Result
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import read_trace

_MARKS = (0.5, 1.0)


def same(traces: Traces) -> Iterator[Row]:
    """One run twice, in processes whose sets and dictionaries lie in another order; one run, looked into."""
    setup = "conversation 2×, raw ticks, 8P2D, predictive"
    told = [_digest_elsewhere(traces.folder, hash_seed) for hash_seed in (1, 2)]
    equal = len(set(told)) == 1
    yield Row("same seed, same result to the bit", "goal", "1", float(equal), equal, setup=setup)
    grown = _grown(traces)
    yield Row("memory at the last arrival / at half", "goal", "≤ 1.05", grown, grown <= 1.05, setup=setup)


def digest(result: Result) -> str:
    """Tells two results apart that differ in one bit."""
    return hashlib.sha256(repr(result).encode()).hexdigest()


def _digest_elsewhere(folder: Path, hash_seed: int) -> str:
    command = [sys.executable, str(Path(__file__)), str(folder / "conversation_trace.jsonl")]
    # What this process imports from, the other must, too.
    paths = {
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
    }
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | paths)
    return ran.stdout.strip()


def _grown(traces: Traces) -> float:
    """What is held when the last request arrives, by what is held after half of them.

    The trace and the outcomes, which a result consists of, are there from the beginning.
    """
    trace = traces.trace("conversation")
    arrived = 0
    held: list[int] = []
    marks = {int(len(trace) * share) for share in _MARKS}

    def look() -> None:
        nonlocal arrived
        arrived += 1
        if arrived in marks:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        simulate(admitted(AdmissionMode.PREDICTIVE, 8, 2), trace, speed=2.0, on_arrival=look)
    finally:
        tracemalloc.stop()
    return held[-1] / held[0]


if __name__ == "__main__":
    requests = read_trace(Path(sys.argv[1]))
    print(digest(simulate(admitted(AdmissionMode.PREDICTIVE, 8, 2), requests, speed=2.0, seed=7)))
