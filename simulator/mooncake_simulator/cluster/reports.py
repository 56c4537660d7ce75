"""Loads that are known late: as they were a while ago (arXiv 2407.00079, Fig. 9)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from mooncake_core.ledger import InstanceLoad
from mooncake_core.ledger.board import Board
from mooncake_simulator.cluster.agenda import Agenda

_NOTHING: Mapping[str, InstanceLoad] = {}


class LateLoads:
    """What a scheduler knows that goes by reports, without a ledger of its own.

    Args:
        agenda: the time.
        board: the loads as they are.
        age_s: how old they are when they are looked at.
    """

    def __init__(self, agenda: Agenda, board: Board, age_s: float) -> None:
        self._agenda = agenda
        self._board = board
        self._age_s = age_s
        self._seen: deque[Mapping[str, InstanceLoad]] = deque()

    def look_at(self, times_s: Sequence[float]) -> None:
        """Take note ahead of each of these moments, which must not fall."""
        for time_s in times_s:
            if time_s < self._age_s:
                self._seen.append(_NOTHING)
            else:
                self._agenda.at(time_s - self._age_s, self._note)

    def next(self) -> Mapping[str, InstanceLoad]:
        """The loads as they were so long before the next of those moments."""
        return self._seen.popleft()

    def _note(self) -> None:
        self._seen.append(self._board.loads(self._agenda.now_s))
