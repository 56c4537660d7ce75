"""What became of promotions, and how sure one must be of a next turn for the next one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

EVEN = 0.5
"""Below, reading ahead costs the SSD more reads than it spares the requests."""
_STEP_UP = 0.05
_STEP_DOWN = 0.01
_WINDOW_BLOCKS = 256.0
_FORGIVEN_A_S = 0.0005


@dataclass(slots=True)
class Scores:
    """Promoted blocks by what became of them.

    Args:
        most_wasted: share of wasted blocks from which the bar rises.
    """

    most_wasted: float = 0.2
    in_time: int = 0
    """There when the turn came."""
    late: int = 0
    """Still being read."""
    wasted: int = 0
    """Demoted, or the session forgotten, before a turn came."""
    bar: float = 0.8
    """A promotion is made where its use is at least as probable. Above 1: none is made."""
    _useful: float = 0.0
    _useless: float = 0.0

    def used(self, blocks: int, late: int) -> None:
        """A turn came that needed so many promoted blocks, and others that were still on their way."""
        self.in_time += blocks
        self.late += late
        self._weigh(blocks + late, 0)

    def lost(self, blocks: int) -> None:
        """So many were promoted for nothing."""
        self.wasted += blocks
        self._weigh(0, blocks)

    def forgive(self, seconds: float) -> None:
        """Time passes: who stood back tries again."""
        if self.bar > EVEN:
            self.bar = max(EVEN, self.bar - _FORGIVEN_A_S * seconds)

    def _weigh(self, useful: int, useless: int) -> None:
        self._useful += useful
        self._useless += useless
        total = self._useful + self._useless
        if total < _WINDOW_BLOCKS / 4:
            return
        # Half of what is allowed is aimed at: verdicts come long after the promotions they are about.
        if self._useless / total > self.most_wasted / 2:
            self.bar = min(1.01, self.bar + _STEP_UP * useless / (_WINDOW_BLOCKS / 4))
        else:
            self.bar = max(EVEN, self.bar - _STEP_DOWN * useful / (_WINDOW_BLOCKS / 4))
        if total > _WINDOW_BLOCKS:
            self._useful /= 2
            self._useless /= 2
