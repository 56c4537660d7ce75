"""Model time: how many model seconds have passed on this machine, and how to wait for a moment of it."""

from __future__ import annotations

import asyncio
import time


class ModelClock:
    """Runs `time_scale` model seconds per wall second."""

    def __init__(self, time_scale: float) -> None:
        self.time_scale = time_scale
        self._origin_s = time.monotonic()

    def now_s(self) -> float:
        """Model seconds since the clock was made."""
        return (time.monotonic() - self._origin_s) * self.time_scale

    async def until(self, moment_s: float) -> None:
        """Wait for a moment of model time; a moment that has passed only yields to others.

        The caller counts moments in model time and never asks for "so long from now": lateness of one wait is
        thereby made good by the next ones and does not add up.
        """
        await asyncio.sleep(max(0.0, (moment_s - self.now_s()) / self.time_scale))
