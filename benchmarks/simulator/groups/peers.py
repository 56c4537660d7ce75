"""kv-centric against the published formulas of other routers, from 80 % utilisation up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from rows import Row, quotient
from setups import Traces, placed

PEERS = ("dynamo", "vllm-kv-aware", "sglang-cache-aware", "llm-d-weighted")
SETUPS = (("conversation", 8, 1.75), ("conversation", 16, 3.75), ("synthetic", 8, 1.5))


def peers(traces: Traces) -> Iterator[Row]:
    """Each peer with own caches only against kv-centric with its pool, and both behind a shared store."""
    for name, prefill, speed in SETUPS:
        for store in (False, True):
            ours = _ttfts_s(traces, name, "kv-centric", prefill, speed, "store" if store else "peer")
            at = f"{name} {prefill}P {speed}×, {'shared store' if store else 'own caches'}"
            setup = f"{at}, raw ticks, {prefill}P{prefill}D"
            for peer in PEERS:
                theirs = _ttfts_s(traces, name, peer, prefill, speed, "store" if store else "none")
                yield quotient(ours, theirs).row(
                    f"mean TTFT, kv-centric / {peer}, {at}", "goal", "≤ 0.90", lambda ratio: ratio <= 0.90,
                    setup,
                )  # fmt: skip


def peers_alone(traces: Traces) -> Iterator[Row]:
    """The formulas alone: kv-centric without its pool too; and little load, where there is little to win."""
    for name, prefill, speed in (*SETUPS, ("conversation", 16, 1.0), ("synthetic", 16, 1.0)):
        ours = _ttfts_s(traces, name, "kv-centric", prefill, speed, "none")
        setup = f"{name} {prefill}P {speed}×, own caches on both sides, raw ticks, {prefill}P{prefill}D"
        for peer in PEERS:
            theirs = _ttfts_s(traces, name, peer, prefill, speed, "none")
            yield quotient(ours, theirs).row(
                f"mean TTFT, kv-centric without its pool / {peer}, {name} {prefill}P {speed}×", "report",
                "no threshold", lambda _: True, setup,
            )  # fmt: skip


def _ttfts_s(
    traces: Traces,
    name: str,
    policy: str,
    prefill: int,
    speed: float,
    fetch: Literal["none", "peer", "store"],
) -> list[float]:
    return traces.mean_ttfts_s(name, replace(placed(policy, prefill, prefill), fetch=fetch), speed)
