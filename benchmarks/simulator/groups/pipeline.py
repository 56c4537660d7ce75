"""Pipeline groups: prefill nodes of which several work at one prompt (FAST'25 §3.3), against nodes apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from rows import Row, found, quotient
from setups import Traces, placed

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.outcome import Result

NODES = 16
STAGES = 4
LONG_TOKENS = 100_000


def pipeline(traces: Traces) -> Iterator[Row]:
    """At little load stages are idle, and one prompt can have four of them."""
    for name in ("conversation", "synthetic"):
        for jittered in (False, True) if name == "conversation" else (False,):
            apart = traces.runs(name, placed("algorithm-1", NODES, NODES), 1.0, jittered)
            groups = traces.runs(name, grouped(NODES, STAGES), 1.0, jittered)
            at = f"{name} {NODES}P 1× {'jittered' if jittered else 'raw'}"
            setup = f"{at} ticks, {NODES // STAGES} groups of {STAGES} nodes against {NODES} nodes"
            yield quotient(_means_s(groups), _means_s(apart)).row(
                f"kv-centric on pipeline groups / algorithm-1, {at}", "goal", "≤ 0.75",
                lambda ratio: ratio <= 0.75, setup,
            )  # fmt: skip
            yield quotient(_means_s(groups, LONG_TOKENS), _means_s(apart, LONG_TOKENS)).row(
                f"the same, prompts above 100 000 tokens, {at}", "report", "no threshold", lambda _: True,
                setup,
            )  # fmt: skip


def pipeline_shapes(traces: Traces) -> Iterator[Row]:
    """How many stages, all nodes or half of them, and what of it is left under load: against nodes apart."""
    for name, speed in (
        ("conversation", 1.0),
        ("synthetic", 1.0),
        ("conversation", 3.75),
        ("synthetic", 3.0),
    ):
        apart = traces.runs(name, placed("kv-centric", NODES, NODES), speed)
        for stages, single in ((2, 0), (4, 0), (8, 0), (4, 8)):
            runs = traces.runs(name, grouped(NODES, stages, single), speed)
            shape = f"{(NODES - single) // stages}×{stages}" + (
                f" and {single} nodes apart" if single else ""
            )
            at = f"{shape}, {name} {NODES}P {speed}×"
            setup = f"{at}, raw ticks, {NODES} nodes for prefill, kv-centric on both sides, no shared store"
            for kind, values in (("mean", _means_s), ("P99", _tails_s)):
                yield quotient(values(runs), values(apart)).row(
                    f"{kind} TTFT, groups / nodes apart, {at}",
                    "report",
                    "no threshold",
                    lambda _: True,
                    setup,
                )
            yield found([run.goodput_within(30.0, None) for run in runs]).row(
                f"share within 30 s, {at}", "report", "no threshold", lambda _: True, setup
            )


def grouped(nodes: int, stages: int, single: int = 0) -> ClusterSpec:
    """So many nodes for prefill, in groups of several stages except some that stay single."""
    group = LLAMA3_70B_A800.over(stages, tensor=8, pipeline=stages)
    kinds = (group,) * ((nodes - single) // stages) + (LLAMA3_70B_A800,) * single
    return replace(placed("kv-centric", len(kinds), nodes), prefill_profiles=kinds)


def _means_s(runs: list[Result], least_tokens: int = 0) -> list[float]:
    return [
        fmean([o.ttft_s for o in run.outcomes if o.ttft_s is not None and o.prompt_tokens >= least_tokens])
        for run in runs
    ]


def _tails_s(runs: list[Result]) -> list[float]:
    return [run.ttft_percentile_s(0.99) for run in runs]
