"""kv-centric against the papers' Algorithm 1, with little to do and with much."""

from __future__ import annotations

from collections.abc import Iterator

from rows import Row, found, quotient
from setups import Traces, placed

TTFT_TARGET_S = 30.0


def low_load(traces: Traces) -> Iterator[Row]:
    """At the trace's own speed nothing is to be won by choosing, and nothing may be lost."""
    for name, prefill, jittered in (
        ("conversation", 16, False), ("conversation", 16, True), ("conversation", 8, True),
        ("synthetic", 16, False), ("synthetic", 8, False),
    ):  # fmt: skip
        ours = traces.mean_ttfts_s(name, placed("kv-centric", prefill, prefill), 1.0, jittered)
        paper = traces.mean_ttfts_s(name, placed("algorithm-1", prefill, prefill), 1.0, jittered)
        floor_s = traces.floor_s(name)
        at = f"{name} {prefill}P 1× {'jittered' if jittered else 'raw'}"
        setup = f"{at} ticks, {prefill}P{prefill}D, no shared store"
        yield quotient(ours, paper).row(
            f"kv-centric / algorithm-1, {at}", "goal", "≤ 1.01", lambda ratio: ratio <= 1.01, setup
        )
        yield found([each / floor_s for each in ours]).row(
            f"kv-centric / floor, {at}", "goal", "≤ 1.08", lambda ratio: ratio <= 1.08,
            f"{setup}; floor {floor_s:.3f} s",
        )  # fmt: skip


def high_load(traces: Traces) -> Iterator[Row]:
    """From 80 % utilisation up: the mean must fall, and nobody may pay for it."""
    for name, prefill, speed in (
        ("conversation", 8, 1.75), ("conversation", 16, 3.75), ("synthetic", 8, 1.5),
    ):  # fmt: skip
        ours = traces.runs(name, placed("kv-centric", prefill, prefill), speed)
        paper = traces.runs(name, placed("algorithm-1", prefill, prefill), speed)
        at = f"{name} {prefill}P {speed}×"
        setup = f"{at}, raw ticks, {prefill}P{prefill}D, no shared store"
        means = [run.mean_ttft_s for run in ours], [run.mean_ttft_s for run in paper]
        yield quotient(*means).row(
            f"mean TTFT, kv-centric / algorithm-1, {at}", "goal", "≤ 0.80", lambda ratio: ratio <= 0.80, setup
        )
        tails = [run.ttft_percentile_s(0.99) for run in ours], [run.ttft_percentile_s(0.99) for run in paper]
        yield quotient(*tails).row(
            f"P99 TTFT, kv-centric / algorithm-1, {at}", "goal", "≤ 1.15", lambda ratio: ratio <= 1.15, setup
        )
        more = [
            100 * (before.goodput_within(TTFT_TARGET_S, None) - run.goodput_within(TTFT_TARGET_S, None))
            for run, before in zip(ours, paper, strict=True)
        ]
        yield found(more).row(
            f"points over 30 s more than algorithm-1, {at}", "goal", "≤ 0.1", lambda points: points <= 0.1,
            setup,
        )  # fmt: skip
