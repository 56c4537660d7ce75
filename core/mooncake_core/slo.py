"""What a request's SLO is measured by. One definition for the gateway, the replay and the simulator."""

from __future__ import annotations

from collections.abc import Iterable

WORST_ONE_IN = 10
"""A request's TBT is taken over the longest tenth of its gaps."""


def worst_gaps_mean(gaps_s: Iterable[float]) -> float | None:
    """A request's time between tokens: the mean of the longest 10 % of its gaps (FAST'25 §5.1).

    Args:
        gaps_s: Times between the tokens of one answer, in any order. Of fewer than ten the longest alone
            counts; a share that is no whole number is rounded up, so that never less than 10 % is looked at.

    Returns:
        The mean in the unit of the gaps; None without gaps.
    """
    longest = sorted(gaps_s, reverse=True)
    if not longest:
        return None
    del longest[-(-len(longest) // WORST_ONE_IN) :]
    return sum(longest) / len(longest)
