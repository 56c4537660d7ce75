"""A sketch of many values that gives percentiles and can be added to those of others.

Percentiles of several schedulers cannot be averaged; their sketches can be added up. Buckets grow by a
constant factor, so that every percentile is right to 1 % of its value (DDSketch, VLDB'19).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, log
from typing import Self

ACCURACY = 0.01
"""Largest relative error of a percentile."""
SMALLEST = 1e-6
"""Values below count as this."""

_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_PER_LOG = 1 / log(_GROWTH)


class Sketch:
    """Counts of positive values in buckets of equal relative width."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        """Begin empty, or from `counts` of another one."""
        self._counts: Counter[int] = Counter(counts or {})

    @classmethod
    def from_wire(cls, counts: Mapping[str, int]) -> Self:
        """Read what `to_wire` wrote.

        Raises:
            ValueError: these are no counts.
        """
        read = {int(bucket): int(count) for bucket, count in counts.items()}
        if any(count < 0 for count in read.values()):
            raise ValueError("a sketch holds no negative counts")
        return cls(read)

    def to_wire(self) -> dict[str, int]:
        """Counts by bucket, for JSON."""
        return {str(bucket): count for bucket, count in sorted(self._counts.items())}

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[ceil(log(max(value, SMALLEST)) * _PER_LOG)] += 1

    def merge(self, other: Sketch) -> None:
        """Count all that another has counted."""
        self._counts.update(other._counts)

    def __len__(self) -> int:
        """How many values were counted."""
        return self._counts.total()

    def percentile(self, share: float) -> float:
        """The value that at least `share` of the values do not exceed, to `ACCURACY`.

        Args:
            share: 0 < share <= 1; 0.9 asks for the P90.

        Raises:
            ValueError: there are no values, or the share is out of range.
        """
        if not 0 < share <= 1:
            raise ValueError(f"a share lies above 0 and up to 1, not at {share}")
        left = ceil(round(share * len(self), 9))
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(2 * _GROWTH**bucket / (_GROWTH + 1))
        raise ValueError("nothing was measured: there is no percentile of no values")
