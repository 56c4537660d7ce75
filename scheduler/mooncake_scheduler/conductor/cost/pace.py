"""What prefills take to compute, told from when they were sent and when they ended, also under load.

An engine takes prompts in the order in which they come and works without pause while one waits. So the time
between the ends of two that follow each other is what the second took, however long it had waited (a busy
period of queueing theory). That needs no word of the engine's, only that all its work is seen from here.
"""

from __future__ import annotations

from typing import NamedTuple

TOGETHER_S = 0.01
"""Seconds between two ends that belong to one step of the engine: short prompts are computed together."""
_MOST_TOGETHER = 16


class Sent(NamedTuple):
    """A prefill on its way."""

    at_s: float
    ahead: int
    """Prefills that were sent before it and had not ended."""
    turn: int
    """Prefills that end before it, from the beginning; −1 where somebody else's may be among them."""


class Computed(NamedTuple):
    """What was computed without pause: one prompt, or a few short ones."""

    tokens: int
    """Computed, so without those that were cached."""
    squares: int
    """Σ n² − p² over the prompts, of n tokens of which p were cached."""
    seconds: float
    alone: bool = False
    """One prompt on an idle instance: it passed through all stages; behind others only the pace is seen."""


class PrefillPace:
    """The prefills of one instance. Times are seconds of one clock; which one is the caller's affair."""

    __slots__ = ("_disturbed", "_ended", "_last_end_s", "_waiting", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        """Sent and not ended."""
        self._ended = 0
        self._last_end_s = 0.0
        self._disturbed = 0
        """Turns before this one tell nothing."""
        self._waiting: tuple[Computed, int] | None = None
        """What the next end may still belong to, and of how many prompts."""

    def sent(self, now_s: float, *, alone: bool = True) -> Sent:
        """A prefill is sent; `alone`: nobody else's work is known to wait there."""
        ahead = self.under_way
        self.under_way += 1
        return Sent(now_s, ahead, self._ended + ahead if alone else -1)

    def ended(self, sent: Sent, tokens: int, cached: int, now_s: float) -> Computed | None:
        """A prefill has ended; what that tells of it or of those before.

        Args:
            sent: what `sent` said.
            tokens: of its prompt.
            cached: of these, not computed.
            now_s: when.
        """
        turn, before_s = self._ended, self._last_end_s
        together = sent.ahead > 0 and now_s - before_s < TOGETHER_S
        self._leave(now_s)
        waiting, self._waiting = self._waiting, None
        if sent.turn != turn or turn < self._disturbed:
            # Out of turn, or behind somebody unknown. If in the same step as the one before, so is that one.
            return None if together or waiting is None else waiting[0]
        new, squares = tokens - cached, tokens * tokens - cached * cached
        seconds = now_s - (max(sent.at_s, before_s) if sent.ahead else sent.at_s)
        one, count = Computed(new, squares, seconds, alone=not sent.ahead), 1
        finished = None
        if waiting is not None:
            if together and waiting[1] < _MOST_TOGETHER:
                former, count = waiting[0], waiting[1] + 1
                one = Computed(former.tokens + new, former.squares + squares, former.seconds + seconds)
            else:
                finished = waiting[0]
        elif together:
            # The one before told nothing, and this one shared its step.
            return None
        if finished is None and not self.under_way:
            return one
        self._waiting = (one, count)
        return finished

    def dropped(self, sent: Sent, now_s: float) -> None:
        """A prefill failed, was aborted, or its end was not seen: those behind it began nobody knows when."""
        del sent
        self._leave(now_s)
        self._waiting = None
        self._disturbed = self._ended + self.under_way

    def _leave(self, now_s: float) -> None:
        self.under_way -= 1
        self._ended += 1
        self._last_end_s = now_s
