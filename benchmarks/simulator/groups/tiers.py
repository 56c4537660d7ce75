"""Sessions whose KV does not fit into DRAM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rows import Row, found, quotient
from setups import Traces

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.contents import Rule
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.cluster.tiers import StoreTiers
from mooncake_simulator.workloads import (
    BLOCK_TOKENS,
    CONVERSATION,
    Request,
    describe,
    generate,
    parse_distribution,
)

SHAPE = msgspec.structs.replace(
    CONVERSATION, turns=parse_distribution("8"), gap_s=parse_distribution("lognormal:60s:1.0")
)
STORE_NODES = 4
HBM_TOKENS = 256_000
"""KV that a prefill instance keeps: little more than what is in use: the pool is there to hold the rest."""


def promotion(traces: Traces) -> Iterator[Row]:
    """Predicted demotion and promotion beside LRU, and the paper's other rules."""
    setup = f"400 sessions of 8 turns, 8P8D, store of {STORE_NODES} nodes, DRAM for a quarter of all blocks"
    p90_s: dict[Rule, list[float]] = {
        "lru": [], "lfu": [], "length-aware": [], "steered": [], "predicted": [],
    }  # fmt: skip
    wasted = []
    for seed in range(1, 1 + len(traces.seeds)):
        trace = generate(400, seed, SHAPE)
        for rule, values_s in p90_s.items():
            result = simulate(tiered(trace, rule), trace, seed=seed)
            values_s.append(result.ttft_percentile_s(0.9))
        assert result.tiers is not None
        wasted.append(result.tiers.wasted_share)
    for rule in ("lfu", "length-aware", "steered"):
        share = quotient(p90_s[rule], p90_s["lru"])
        yield share.row(f"TTFT P90, {rule} / LRU", "report", "", lambda _: True, setup)
    share = quotient(p90_s["predicted"], p90_s["lru"])
    yield share.row("TTFT P90, predicted / LRU", "goal", "≤ 0.75", lambda ours: ours <= 0.75, setup)
    yield found(wasted).row("wasted promotions", "goal", "< 0.20", lambda ours: ours < 0.2, setup)


def tiered(trace: Sequence[Request], rule: Rule) -> ClusterSpec:
    """DRAM for a quarter of the trace's blocks."""
    dram_tokens = describe(trace).unique_blocks * BLOCK_TOKENS // 4
    tiers = StoreTiers(dram_tokens, STORE_NODES, rule)
    return ClusterSpec(8, 8, fetch="store", cache_tokens=HBM_TOKENS, tiers=tiers)
