"""Against serving where every instance does both (FAST'25 §5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rows import Found, Row
from setups import Traces, placed, stalling

from mooncake_simulator.cluster.cluster import ClusterSpec


def coupled(traces: Traces) -> Iterator[Row]:
    """Effective capacity against prefill-first serving at 16 instances: sign, and size within 2.5×."""
    published = {"conversation": (498.0, 157.0, 59.0), "synthetic": (62.0, 40.0, 28.0)}
    for name, gains in published.items():
        whole = ClusterSpec(
            16, 0, policy="load-balance", coupled="prefill-first", fetch="none", cache_tokens=0
        )
        ours = [stalling(placed("algorithm-1", prefill, 16 - prefill)) for prefill in (8, 10)]
        setup = f"{name} 1×, raw ticks, 16 instances against 8P8D or 10P6D, no shared store, TTFT 30 s"
        for target_ms, expected in zip((100, 200, 300), gains, strict=True):
            yield _gain(traces, name, whole, ours, target_ms).row(
                f"gain over prefill first, {name}, TBT {target_ms} ms", "reproduce",
                f"{expected} % within 2.5×",
                lambda gain, expected=expected: expected / 2.5 <= gain <= expected * 2.5, setup,
            )  # fmt: skip


def _gain(
    traces: Traces, name: str, theirs: ClusterSpec, ours: list[ClusterSpec], tbt_target_ms: int
) -> Found:
    base = _effective(traces, name, theirs, tbt_target_ms)
    best = max([_effective(traces, name, spec, tbt_target_ms) for spec in ours], key=median)
    pairs = [100 * (one / other - 1) for one, other in zip(best, base, strict=True)]
    return Found(100 * (median(best) / median(base) - 1), (min(pairs), max(pairs)))


def _effective(traces: Traces, name: str, spec: ClusterSpec, tbt_target_ms: int) -> list[float]:
    return [run.goodput_within(30.0, tbt_target_ms / 1e3) for run in traces.runs(name, spec)]
