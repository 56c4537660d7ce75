"""Amounts over time, in windows of equal length: what plots show and swings are measured on."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import pstdev

WINDOW_S = 10.0


class Series:
    """An amount summed up over windows of time. It grows with the time covered, not with what is added.

    Args:
        window_s: length of a window.
    """

    __slots__ = ("_sums", "window_s")

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._sums: list[float] = []

    def add(self, begin_s: float, end_s: float, rate: float = 1.0) -> None:
        """Add `rate` for every second between two moments, the first not below 0."""
        window_s, sums = self.window_s, self._sums
        first, last = int(begin_s / window_s), int(end_s / window_s)
        if last >= len(sums):
            sums.extend([0.0] * (last + 1 - len(sums)))
        if first == last:
            sums[first] += (end_s - begin_s) * rate
            return
        sums[first] += ((first + 1) * window_s - begin_s) * rate
        for at in range(first + 1, last):
            sums[at] += window_s * rate
        sums[last] += (end_s - last * window_s) * rate

    def means(self, until_s: float, divisor: float = 1.0) -> list[float]:
        """What held on average in each window, divided by `divisor`.

        Args:
            until_s: only windows that end by then are told, and the first in any case: of one that is cut
                short it is not known what belongs to which part.
            divisor: e.g. the number of instances, for their mean share.
        """
        windows = max(1, int(until_s / self.window_s))
        sums = self._sums[:windows] + [0.0] * (windows - len(self._sums))
        return [total / (self.window_s * divisor) for total in sums]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of both stages over time: one value a window, each a mean over the stage's instances."""

    window_s: float
    prefill: list[float]
    """Share of time in which prompts were computed."""
    decode: list[float]
    """Share of time in which there was a batch."""
    kv: list[float]
    """Share of the decode instances' KV memory that was in use."""


def swing(shares: list[float], windows: int = 3) -> float:
    """How much a load swings: the standard deviation of its means over so many windows each.

    The papers' swings take minutes (arXiv Fig. 9): half a minute is short enough to see them, and long enough
    not to see single prompts.
    """
    means = [sum(shares[at : at + windows]) / windows for at in range(0, len(shares) - windows + 1, windows)]
    return pstdev(means) if means else 0.0
