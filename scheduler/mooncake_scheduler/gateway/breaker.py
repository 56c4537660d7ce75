"""Circuit breakers: an instance that keeps failing is left alone for a while. Pure; time is a parameter.

Faults only count (`Setback.is_fault`): a client's mistakes or back-pressure say nothing about the health of
an instance, and must neither open a breaker (sglang#25811) nor close one that is half-open (smg#2565).
"""

from __future__ import annotations

from enum import StrEnum

THRESHOLD = 5
FIRST_OPEN_S = 1.0
LONGEST_OPEN_S = 30.0


class BreakerState(StrEnum):
    """Whether an instance gets requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One request is let through to see."""


class Breaker:
    """One instance's breaker.

    Args:
        threshold: faults in a row that open it.
    """

    __slots__ = ("_open_s", "_opened_s", "_threshold", "_trial_s", "faults", "state")

    def __init__(self, threshold: int = THRESHOLD) -> None:
        self._threshold = threshold
        self.faults = 0
        """In a row."""
        self._open_s = FIRST_OPEN_S
        self._opened_s = 0.0
        self._trial_s = 0.0
        self.state = BreakerState.CLOSED

    def admits(self, now_s: float) -> bool:
        """Whether a request may be placed there now."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN:
            return now_s - self._opened_s >= self._open_s
        # A trial whose outcome says nothing (or never comes) must not keep the instance out for ever.
        return now_s - self._trial_s >= self._open_s

    def sent(self, now_s: float) -> None:
        """A request was sent there."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.HALF_OPEN
            self._trial_s = now_s

    def succeeded(self) -> None:
        """It served a request."""
        self.faults = 0
        self._open_s = FIRST_OPEN_S
        self.state = BreakerState.CLOSED

    def failed(self, now_s: float) -> None:
        """It failed in a way that counts."""
        self.faults += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open_s = min(self._open_s * 2, LONGEST_OPEN_S)
        elif self.faults < self._threshold or self.state is BreakerState.OPEN:
            return
        self.state = BreakerState.OPEN
        self._opened_s = now_s
