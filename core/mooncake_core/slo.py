"""What a request's SLO is measured by. One definition for the gateway, the replay and the simulator."""

from __future__ import annotations

from collections.abc import Iterable

WORST_ONE_IN = 10
"""A request's TBT is taken over the longest tenth of its gaps."""


def worst_gaps_mean(gaps_s: Iterable[float]) -> float | None:
    """A request's time between tokens: the mean of the longest 10 % of its gaps (FAST'25 §5.1).

    Args:
        gaps_s: Times between the tokens of one answer, in any order.

    Returns:
        The mean in the unit of the gaps; None without gaps.
    """
    longest = sorted(gaps_s, reverse=True)
    return mean_of_first(longest, worst_of(len(longest))) if longest else None


def worst_of(gaps: int) -> int:
    """How many of so many gaps are looked at.

    Of fewer than ten the longest alone counts; a share that is no whole number is rounded up, so that never
    less than 10 % is looked at.
    """
    return -(-gaps // WORST_ONE_IN)


def mean_of_first(longest_s: list[float], count: int) -> float:
    """The mean of the first `count` of gaps that come longest first."""
    return sum(longest_s[:count]) / count
