"""The clock all schedulers of a cluster share, in model seconds."""

from __future__ import annotations

import time


class Clock:
    """Unix time, sped up where engines are simulated faster than life.

    Args:
        scale: model seconds per wall second.
    """

    __slots__ = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def now_s(self) -> float:
        """Now, in model seconds; comparable between processes."""
        return time.time() * self.scale
