"""What is going to happen, in order of time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Events by time; of one moment, in the order in which they were put in. Time never runs back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Have something done at a moment.

        Args:
            time_s: when; a moment that has passed counts as now.
            do: what.
            arguments: its arguments.
        """
        self._count += 1
        heappush(self._heap, (time_s if time_s > self.now_s else self.now_s, self._count, do, arguments))

    def run(self) -> None:
        """Do all there is to do, and what that leads to."""
        heap = self._heap
        while heap:
            self.now_s, _, do, arguments = heappop(heap)
            do(*arguments)
