"""The life of a request, pure: its phases, what may go wrong in each, and what is then done.

received → tokenised → placed → reserved → prefilling → handed over → decoding → done. A request that is not
handed over (one engine does it all) goes from reserved to handed over at once.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final


class Phase(IntEnum):
    """Where a request is. Values grow along its life."""

    RECEIVED = 0
    TOKENISED = 1
    PLACED = 2
    RESERVED = 3
    PREFILLING = 4
    HANDED_OVER = 5
    """Decode was told; no token has come."""
    DECODING = 6
    """The first bytes of the answer went to the client: nothing can be tried again."""
    DONE = 7


def _bits(*phases: Phase) -> int:
    return sum(1 << phase for phase in phases)


_NEXT: Final = {
    Phase.RECEIVED: _bits(Phase.TOKENISED, Phase.DONE),
    Phase.TOKENISED: _bits(Phase.PLACED, Phase.DONE),
    Phase.PLACED: _bits(Phase.RESERVED, Phase.DONE),
    Phase.RESERVED: _bits(Phase.PREFILLING, Phase.HANDED_OVER, Phase.TOKENISED, Phase.DONE),
    Phase.PREFILLING: _bits(Phase.HANDED_OVER, Phase.TOKENISED, Phase.DONE),
    Phase.HANDED_OVER: _bits(Phase.HANDED_OVER, Phase.DECODING, Phase.TOKENISED, Phase.DONE),
    Phase.DECODING: _bits(Phase.DONE),
    Phase.DONE: 0,
}
"""Back to tokenised = placed anew, after a setback; from handed over to the same = to another decode."""
# An enum's hash is a function of Python, and every request goes through all its phases: a tuple is quicker.
_MAY_FOLLOW: Final = tuple(_NEXT[phase] for phase in Phase)


def may_follow(now: Phase, following: Phase) -> bool:
    """Whether a request may go from one phase to another."""
    return _MAY_FOLLOW[now] >> following & 1 == 1


class Setback(StrEnum):
    """What an engine did instead of serving."""

    CONNECT = "connect"
    """Not reached: it never saw the request."""
    BROKEN = "broken"
    """The connection ended before the answer."""
    SERVER_ERROR = "server_error"
    """5xx other than 503, or an error event before the first token."""
    BACK_PRESSURE = "back_pressure"
    """429 or 503: it has no room now. Not a fault."""
    GONE = "gone"
    """It left, or kept failing, while the request waited for it: it never saw the request."""
    CLIENT_ERROR = "client_error"
    """Another 4xx: the client's own."""
    DEADLINE = "deadline"
    """Nothing came in time."""

    @property
    def is_fault(self) -> bool:
        """Whether it counts against the instance: opens its breaker in the end."""
        return self not in (Setback.BACK_PRESSURE, Setback.CLIENT_ERROR, Setback.GONE)


class Remedy(StrEnum):
    """What is done about a setback."""

    PLACE_ANEW = "place_anew"
    """Try again without the instance that failed."""
    HAND_OVER_AGAIN = "hand_over_again"
    """The staged KV was not touched: give it to another decode instance."""
    PASS_ON = "pass_on"
    """The engine's answer is the client's answer."""
    FAIL = "fail"
    """An error answer of our own."""
    END_STREAM = "end_stream"
    """An error event and the end mark: the client must not take what it got for the whole."""


def setback_of_status(status: int) -> Setback | None:
    """What an engine's status means; None = served."""
    if 200 <= status < 300:
        return None
    if status in (429, 503):
        return Setback.BACK_PRESSURE
    return Setback.CLIENT_ERROR if 400 <= status < 500 else Setback.SERVER_ERROR


def remedy(phase: Phase, setback: Setback, *, staged: bool, may_retry: bool) -> Remedy:
    """What to do about a setback.

    Args:
        phase: where the request was.
        setback: what happened.
        staged: a prefill instance holds this request's KV, waiting for decode to take it.
        may_retry: attempts and the retry budget are not used up.
    """
    if phase >= Phase.DECODING:
        return Remedy.END_STREAM
    if setback is Setback.CLIENT_ERROR:
        return Remedy.PASS_ON
    if may_retry:
        untouched = setback in (Setback.CONNECT, Setback.BACK_PRESSURE, Setback.GONE)
        if staged and untouched:
            return Remedy.HAND_OVER_AGAIN
        return Remedy.PLACE_ANEW
    return Remedy.PASS_ON if setback is Setback.BACK_PRESSURE else Remedy.FAIL


class RetryBudget:
    """Bounds retries to a share of the requests, so that a sick cluster is not hit with twice the load.

    Args:
        share: retries allowed for each request.
        burst: retries allowed at first, and most that can be saved.
    """

    __slots__ = ("_burst", "_left", "_share")

    def __init__(self, share: float = 0.2, burst: float = 20.0) -> None:
        self._share = share
        self._burst = burst
        self._left = burst

    def request(self) -> None:
        """A request came in."""
        if self._left < self._burst:
            self._left = min(self._burst, self._left + self._share)

    @property
    def empty(self) -> bool:
        """Whether no retry is left."""
        return self._left < 1.0

    def spend(self) -> None:
        """A retry is made."""
        self._left -= 1.0
