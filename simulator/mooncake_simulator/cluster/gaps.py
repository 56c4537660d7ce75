"""The gaps between the tokens of an answer, as runs of even growth that are hardly ever written out."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from mooncake_core.slo import mean_of_first, worst_of


class Run(NamedTuple):
    """Steps of one batch: the gap after step n, counted from 0, is `first_s + growth_s * n`."""

    first_s: float
    growth_s: float
    """Seconds that each gap is longer than the one before it, 0 or more."""
    steps: int

    def after(self, step: int) -> float:
        """The gap after a step, counted from 0."""
        return self.first_s + self.growth_s * step

    def since(self, gap_s: float) -> int:
        """A step before which no gap is as long as that, and after which nearly all are; the last one is."""
        first_s, growth_s, steps = self
        if first_s >= gap_s:
            return 0
        step = int(min(steps, (gap_s - first_s) / growth_s))
        while step and self.after(step - 1) >= gap_s:
            step -= 1
        return step


def worst_gaps_mean_of(runs: Sequence[Run]) -> float | None:
    """`worst_gaps_mean` of all gaps of some runs, to the bit; only those that may count are written out.

    Args:
        runs: in any order.

    Returns:
        The mean in seconds; None without gaps.
    """
    count = worst_of(sum([run.steps for run in runs]))
    if not count:
        return None
    least_s = _as_many_are_longer(runs, count)
    longest: list[float] = []
    for run in runs:
        first_s, growth_s, steps = run
        if first_s + growth_s * (steps - 1) >= least_s:
            longest += [first_s + growth_s * step for step in range(run.since(least_s), steps)]
    longest.sort(reverse=True)
    return mean_of_first(longest, count)


def _as_many_are_longer(runs: Sequence[Run], count: int) -> float:
    """Seconds that at least `count` gaps are not shorter than, and hardly more of them."""
    least_s = inf
    for run in sorted(runs, reverse=True):
        if run.steps >= count:
            return min(least_s, run.after(run.steps - count))
        least_s = run.first_s
        count -= run.steps
    return least_s
