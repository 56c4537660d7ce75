"""What has to be right before anything else is believed: what caches find, and what prompts cost."""

from __future__ import annotations

from collections.abc import Iterator

from rows import Row, found
from setups import Traces

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.workloads import BLOCK_TOKENS


def hit_rates(traces: Traces) -> Iterator[Row]:
    """Token hit rates of one cache for all, 512-token blocks, LRU (traces' own figures)."""
    published = {
        "conversation": {None: 0.374, 10_000: 0.215, 30_000: 0.332, 50_000: 0.362},
        "synthetic": {None: 0.651, 10_000: 0.431, 30_000: 0.636, 50_000: 0.651},
    }
    for name, rates in published.items():
        for blocks, expected in rates.items():
            ours = found([run.token_hit_rate for run in traces.runs(name, one_cache(blocks), once=True)])
            size = "endless" if blocks is None else f"{blocks} blocks"
            yield ours.row(
                f"hit rate, {name}, {size}", "reproduce", f"{expected} ± .005",
                lambda rate, expected=expected: abs(rate - expected) <= 0.005,
                f"{name} 1×, one instance, one cache",
            )  # fmt: skip


def prefill_seconds(traces: Traces) -> Iterator[Row]:
    """Mean prefill seconds a request, without a cache and with an endless one."""
    published = {"conversation": (1.64, 1.04), "synthetic": (2.14, 0.73)}
    for name, (without, endless) in published.items():
        for blocks, expected in ((0, without), (None, endless)):
            ours = found([run.mean_prefill_s for run in traces.runs(name, one_cache(blocks), once=True)])
            yield ours.row(
                f"prefill s, {name}, {'no' if blocks == 0 else 'endless'} cache", "reproduce",
                f"{expected} ± 3 %", lambda seconds, expected=expected: abs(seconds / expected - 1) <= 0.03,
                f"{name} 1×, one instance, one cache",
            )  # fmt: skip


def one_cache(blocks: int | None) -> ClusterSpec:
    """One prefill instance with a cache of so many blocks; None = without end."""
    tokens = None if blocks is None else blocks * BLOCK_TOKENS
    return ClusterSpec(1, 64, policy="cache-aware", fetch="none", cache_tokens=tokens)
