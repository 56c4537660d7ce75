"""Percentiles, one definition for all that measures."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank).

    Args:
        ordered: values in rising order, at least one.
        share: 0 < share <= 1; 0.9 asks for the P90.

    Raises:
        ValueError: there are no values, or the share is out of range.
    """
    if not ordered:
        raise ValueError("nothing was measured: there is no percentile of no values")
    if not 0 < share <= 1:
        raise ValueError(f"a share lies above 0 and up to 1, not at {share}")
    # Rounded before it is rounded up: 0.9 · 10 must not become 10 by the last bit of a float.
    rank = ceil(round(share * len(ordered), 9))
    return ordered[rank - 1]
