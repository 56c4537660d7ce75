"""The order of four policies, and the paper's ratios where they appear."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from rows import Row, quotient
from setups import Traces, placed


def placement(traces: Traces) -> Iterator[Row]:
    """8 prefill instances, 1.25×: the paper's ratios of 16 nodes appear there (8P+8D, research)."""
    policies = ("random", "load-balance", "cache-aware", "algorithm-1")
    for jittered in (False, True):
        ticks = "jittered" if jittered else "raw"
        setup = f"conversation 1.25×, {ticks} ticks, 8P8D, no shared store"
        ttfts_s = [
            traces.mean_ttfts_s("conversation", placed(policy, 8, 8), 1.25, jittered) for policy in policies
        ]
        in_order = all(worse > better for worse, better in pairwise([median(each) for each in ttfts_s]))
        yield Row(
            f"random > load > local > algorithm-1, {ticks}", "reproduce", "in this order", float(in_order),
            in_order, setup=setup,
        )  # fmt: skip
        for other, most in (("cache-aware", 0.86), ("load-balance", 0.58)):
            ours = quotient(ttfts_s[-1], ttfts_s[policies.index(other)])
            yield ours.row(
                f"algorithm-1 / {other}, {ticks}", "reproduce", f"≤ {most}",
                lambda ratio, most=most: ratio <= most, setup,
            )  # fmt: skip
