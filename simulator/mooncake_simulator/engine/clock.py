"""Model time: how many model seconds have passed on this machine, and how to wait for a moment of it."""

from __future__ import annotations

import time

from mooncake_simulator.engine.precise_timer import PreciseTimer


class ModelClock:
    """Runs `time_scale` model seconds per wall second."""

    def __init__(self, time_scale: float) -> None:
        self.time_scale = time_scale
        self._origin_s = time.monotonic()
        self._timer: PreciseTimer | None = None

    def now_s(self) -> float:
        """Model seconds since the clock was made."""
        return (time.monotonic() - self._origin_s) * self.time_scale

    async def until(self, moment_s: float) -> None:
        """Wait for a moment of model time; a moment that has passed only yields to others.

        One waiter at a time. It counts moments in model time and never asks for "so long from now": lateness
        of one wait is thereby made good by the next ones and does not add up.
        """
        if self._timer is None:
            self._timer = PreciseTimer()
        await self._timer.until(self._origin_s + moment_s / self.time_scale)

    def close(self) -> None:
        """Give up the timer."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
