"""How long a container that ended waits before it starts again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RestartBackoff:
    """Kubernetes' crash-loop back-off with shorter waits: at once, then 1 s, 2 s, 4 s … 60 s.

    A container that ran for `reset_after_s` is taken for healthy: its next end counts as a first one.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    reset_after_s: float = 600.0
    _ends: int = 0

    def delay_s(self, ran_for_s: float) -> float:
        """Seconds to wait after an end; to be called once for each end.

        Args:
            ran_for_s: how long the process that ended had been running.
        """
        if ran_for_s >= self.reset_after_s:
            self._ends = 0
        self._ends += 1
        if self._ends == 1:
            return 0.0
        # The exponent is bounded: a container may end more often than a float can double.
        return min(self.longest_s, self.first_s * 2.0 ** min(self._ends - 2, 32))
