"""When a session's next turn comes, and whether: learned from the gaps between turns. Pure, memory is flat.

All in octaves (logarithms of seconds to the base of 2), where gaps of people and of programs are spread much
alike. A session is expected to keep its own pace as far as its tenant's sessions were seen to: the
correlation of successive gaps says how far (empirical Bayes). What is left over is a histogram, so that no
shape is assumed; gaps that have not ended yet are in it as far as they go (Kaplan-Meier). Whether another
turn comes at all is learned by the number of the turn (a cure model): a session that is silent counts partly
as one that has ended, the more the longer it is silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2
from typing import Final, NamedTuple

LEAST_S: Final = 0.25
"""Shorter gaps count as this."""
_PRIOR_PACE: Final = log2(60)
_PRIOR_GAPS: Final = 4.0
"""Weight, in observed gaps, of knowing nothing: a minute, give or take six octaves, evenly."""
_REACH: Final = 12
"""Octaves on both sides of what is expected."""
_BINS_AN_OCTAVE: Final = 4
_BINS: Final = 2 * _REACH * _BINS_AN_OCTAVE
_PRIOR_BINS: Final = range(_BINS // 4, 3 * _BINS // 4)
_PRIOR_PAIRS: Final = 8.0
"""Weight, in square octaves, of taking successive gaps for independent."""
_MOST_GAPS: Final = 4_096.0
"""Then all weights are halved: what was long ago fades."""
_TURNS: Final = 64
"""Turns are told apart up to this number."""
_PRIOR_TURNS: Final = 4.0


class NextTurn(NamedTuple):
    """What is expected of a session."""

    comes: float
    """Probability that there is another turn at all."""
    soon: float
    """Probability that it comes within the horizon that was asked for."""


class Pace:
    """The gaps of one session, so far."""

    __slots__ = ("count", "last", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        """Sum of its gaps, in octaves."""
        self.last: float | None = None


class Silent(NamedTuple):
    """A session that has not come again yet, as `Gaps.silent` learns from it."""

    turn: int
    pace: Pace
    silent_s: float
    comes: float
    """How probable it is that it will."""


class Gaps:
    """What was learned of the gaps and ends of one tenant's sessions."""

    def __init__(self) -> None:
        self._counts = [0.0] * _BINS
        for at in _PRIOR_BINS:
            self._counts[at] = _PRIOR_GAPS / len(_PRIOR_BINS)
        self._weight = _PRIOR_GAPS
        self._sum = _PRIOR_GAPS * _PRIOR_PACE
        self._above: list[float] = []
        self._pairs, self._squares = 0.0, _PRIOR_PAIRS
        self._went_on = [0.0] * _TURNS
        self._ended = [0.0] * _TURNS
        self._silent: list[Silent] = []
        self._goes_on: list[float] = []
        self.seen = 0

    def observe_turn(self, turn: int, pace: Pace, gap_s: float) -> None:
        """The turn after number `turn` (from 1) came, so many seconds after it; the pace learns too."""
        gap = log2(max(gap_s, LEAST_S))
        mean = self._sum / self._weight
        self._counts[int(_bin(gap - self._expected(pace)))] += 1
        if pace.last is not None:
            self._pairs += (pace.last - mean) * (gap - mean)
            self._squares += (pace.last - mean) ** 2
        pace.count += 1
        pace.total += gap
        pace.last = gap
        self._sum += gap
        self._weight += 1
        self._went_on[_at(turn)] += 1
        self.seen += 1
        if self._weight > _MOST_GAPS:
            self._fade()
        self._above, self._goes_on = [], []

    def observe_end(self, turn: int) -> None:
        """The session is given up after number `turn`."""
        self._ended[_at(turn)] += 1
        self._goes_on = []

    def silent(self, sessions: Iterable[Silent]) -> None:
        """Those that may or may not have ended, all of them, each time anew."""
        self._silent = list(sessions)
        self._above, self._goes_on = [], []

    def next_turn(self, turn: int, pace: Pace, silent_s: float, within_s: float) -> NextTurn:
        """What is expected of a session.

        Args:
            turn: number of its last turn, from 1.
            pace: its own gaps.
            silent_s: seconds since that turn.
            within_s: the horizon of `soon`.
        """
        expected = self._expected(pace)
        now = self._survival(silent_s, expected)
        later = self._survival(silent_s + within_s, expected)
        goes_on = self._share_going_on(turn)
        silent = goes_on * now + (1 - goes_on)
        if silent <= 0:
            return NextTurn(0.0, 0.0)
        return NextTurn(goes_on * now / silent, goes_on * (now - later) / silent)

    @property
    def typical_s(self) -> float:
        """A gap as it is on the whole (the geometric mean)."""
        return float(2 ** (self._sum / self._weight))

    def _expected(self, pace: Pace) -> float:
        """The centre of a session's next gap, in octaves."""
        mean = self._sum / self._weight
        if not pace.count:
            return mean
        kept = min(0.99, max(0.0, self._pairs / self._squares))
        trust = pace.count * kept / (1 - kept + pace.count * kept)
        return mean + trust * (pace.total / pace.count - mean)

    def _survival(self, silent_s: float, expected: float) -> float:
        """Share of the gaps that are longer; straight in the logarithm within a bin."""
        above = self._above or self._sums()
        place = _bin(log2(max(silent_s, LEAST_S)) - expected)
        at = int(place)
        return above[at] + (above[at + 1] - above[at]) * (place - at)

    def _sums(self) -> list[float]:
        """Kaplan-Meier: a session that is silent still has a gap at least that long, if it comes again."""
        waiting = [0.0] * _BINS
        for one in self._silent:
            octaves = log2(max(one.silent_s, LEAST_S)) - self._expected(one.pace)
            waiting[int(_bin(octaves))] += one.comes
        left, longer = sum(self._counts) + sum(waiting), 1.0
        above = self._above = [1.0]
        for ended, censored in zip(self._counts, waiting, strict=True):
            at_risk = left - censored / 2
            longer *= 1 - min(1.0, ended / at_risk) if at_risk > 0 else 0.0
            above.append(longer)
            left -= ended + censored
        return above

    def _share_going_on(self, turn: int) -> float:
        """Probability that a turn follows number `turn`: by its number, drawn towards that of all turns."""
        goes_on = self._goes_on
        if not goes_on:
            going, seen = (
                list(self._went_on),
                [a + b for a, b in zip(self._went_on, self._ended, strict=True)],
            )
            for one in self._silent:
                going[_at(one.turn)] += one.comes
                seen[_at(one.turn)] += 1
            overall = (sum(going) + _PRIOR_TURNS) / (sum(seen) + 1.25 * _PRIOR_TURNS)
            goes_on = self._goes_on = [
                (one + _PRIOR_TURNS * overall) / (all_ + _PRIOR_TURNS)
                for one, all_ in zip(going, seen, strict=True)
            ]
        return goes_on[_at(turn)]

    def _fade(self) -> None:
        self._counts = [count / 2 for count in self._counts]
        self._went_on = [count / 2 for count in self._went_on]
        self._ended = [count / 2 for count in self._ended]
        self._weight /= 2
        self._sum /= 2
        self._pairs /= 2
        self._squares = self._squares / 2 + _PRIOR_PAIRS / 2


def _bin(octaves: float) -> float:
    """Bin and place in it."""
    return min(max(0.0, (octaves + _REACH) * _BINS_AN_OCTAVE), _BINS - 1e-9)


def _at(turn: int) -> int:
    return min(turn, _TURNS) - 1
