"""What the papers and the tutorial promise of the whole: throughput, concurrency, cost per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from rows import Found, Row
from setups import Traces, placed, stalling

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncakectl.plan.search import Prices, Size, cheapest, fewest

SHARE, TTFT_TARGET_S, TBT_TARGET_S = 0.9, 30.0, 0.1
_FINEST = 2 ** (1 / 8)
_MOST_INSTANCES = 128


def claims(traces: Traces) -> Iterator[Row]:
    """Against vLLM V0 (prefill first, no cache), conversation, 90 % within 30 s and 100 ms.

    The searches are made with one seed: each is a dozen runs.
    """
    setup = "conversation, raw ticks, no shared store, join stall 30 GB/s"
    theirs, ours = _inside(traces, coupled(20)), _inside(traces, disaggregated(10, 10))
    pairs = [100 * (one / other - 1) for one, other in zip(ours, theirs, strict=True)]
    gain = Found(100 * (median(ours) / median(theirs) - 1), (min(pairs), max(pairs)))
    yield gain.row(
        "throughput: more requests inside the SLO, 10P10D against 20 coupled, %", "reproduce",
        "75 % within 2.5×", lambda more: 75 / 2.5 <= more <= 75 * 2.5, f"{setup}, 1×",
    )  # fmt: skip
    ratio = _most_speed(traces, disaggregated(8, 8)) / _most_speed(traces, coupled(16))
    yield Row(
        "concurrency: users at 16 instances inside the SLO, ours / coupled", "reproduce", "5 (tutorial)",
        ratio, ratio >= 5, setup=f"{setup}, 8P8D against 16, one seed; highest load in steps of 9 %",
    )  # fmt: skip
    cost = _fewest(traces) / _fewest_coupled(traces)
    yield Row(
        "cost per token: instances for the trace, ours / coupled", "reproduce", "0.25 (tutorial)", cost,
        cost <= 0.25, setup=f"{setup}, 1×, one seed; fewest of up to {_MOST_INSTANCES}",
    )  # fmt: skip


def coupled(instances: int) -> ClusterSpec:
    """vLLM V0 without a prefix cache."""
    return ClusterSpec(
        instances, 0, policy="load-balance", coupled="prefill-first", fetch="none", cache_tokens=0
    )


def disaggregated(prefill: int, decode: int) -> ClusterSpec:
    """This system."""
    return stalling(placed("kv-centric", prefill, decode))


def _inside(traces: Traces, spec: ClusterSpec, speed: float = 1.0, once: bool = False) -> list[float]:
    runs = traces.runs("conversation", spec, speed, once=once)
    return [run.goodput_within(TTFT_TARGET_S, TBT_TARGET_S) for run in runs]


def _keeps(traces: Traces, spec: ClusterSpec, speed: float = 1.0) -> bool:
    return _inside(traces, spec, speed, once=True)[0] >= SHARE


def _most_speed(traces: Traces, spec: ClusterSpec) -> float:
    """The highest load at which the SLO is kept, from a thirty-second of the trace's to four times it."""
    steps = fewest(lambda step: not _keeps(traces, spec, 4.0 / _FINEST ** (56 - step)), 0, 57)
    return float(4.0 / _FINEST ** (56 - max(steps - 1, 0)))


def _fewest(traces: Traces) -> int:
    """Instances that this system needs for the trace."""
    size = cheapest(
        lambda size: _keeps(traces, disaggregated(*size)), Prices(1, 1), least=Size(1, 1), most=Size(16, 16)
    )
    return sum(size)


def _fewest_coupled(traces: Traces) -> int:
    """Instances that the coupled system needs; more than are tried count as the most that are."""
    whole = coupled(1)
    return fewest(lambda count: _keeps(traces, replace(whole, prefill=count)), 4, _MOST_INSTANCES)
