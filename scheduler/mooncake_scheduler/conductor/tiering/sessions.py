"""Which prompts belong to one conversation: each turn's prompt begins with the one before. Pure.

Nobody names a session. But block keys are chained, so the last full block of a prompt stands for all of it,
and a prompt that goes through the last block of an earlier one continues it. A block from which several
prompts went on in different ways is a shared prefix (a system prompt), and no session's end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from mooncake_scheduler.conductor.tiering.gaps import Gaps, NextTurn, Pace, Silent

MOST_SESSIONS = 10_000
"""Then those silent longest are forgotten."""
_GIVEN_UP = 0.01
"""A session that is less likely to come again is forgotten,"""
_LEAST_GAPS = 32
"""as soon as so many gaps of its tenant were seen."""


class Session:
    """One conversation.

    Attributes:
        keys: block keys of its latest prompt, full blocks only.
        turn: number of that prompt, from 1.
        last_s: when it came.
        warm: of the keys, so many from the start are in DRAM (or on their way there).
        busy: its latest prompt is still being prefilled: its KV is in use.
        read_s: when its blocks were last read, by a turn or so that they stay.
    """

    __slots__ = (
        "busy", "keys", "last_s", "number", "pace", "promoted", "read_s", "tenant", "turn", "warm",
    )  # fmt: skip

    def __init__(self, number: int, tenant: str) -> None:
        self.number = number
        self.tenant = tenant
        self.keys: Sequence[int] = ()
        self.turn = 0
        self.last_s = self.read_s = 0.0
        self.pace = Pace()
        self.warm = 0
        self.busy = False
        self.promoted: dict[int, float | None] = {}
        """Blocks, by their place, that were promoted since its last turn, and when they were there."""

    @property
    def cold(self) -> int:
        """Blocks that are not in DRAM."""
        return len(self.keys) - self.warm


class Sessions:
    """The sessions that may go on.

    Args:
        most: sessions that are kept.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._gaps: dict[str, Gaps] = {}
        self._most = most
        self._by_end: dict[tuple[str, int], Session] = {}
        self._by_silence: OrderedDict[int, Session] = OrderedDict()
        self._went_on: OrderedDict[int, int] = OrderedDict()
        """The key that followed one at which a session had ended."""
        self._shared: set[int] = set()
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_silence)

    def __contains__(self, session: object) -> bool:
        return isinstance(session, Session) and self._by_silence.get(session.number) is session

    def __iter__(self) -> Iterator[Session]:
        """Silent longest first."""
        return iter(self._by_silence.values())

    def turn(self, keys: Sequence[int], tenant: str, now_s: float) -> Session:
        """The session that a prompt belongs to, a new one where it continues none; learns from the gap.

        Args:
            keys: block keys of its full blocks; at least one.
            tenant: whose it is.
            now_s: when it came.
        """
        session = self._continued(keys, tenant)
        if session is None:
            self._count += 1
            session = Session(self._count, tenant)
        else:
            self.gaps(tenant).observe_turn(session.turn, session.pace, now_s - session.last_s)
        session.turn += 1
        session.last_s = session.read_s = now_s
        session.keys = keys
        if keys[-1] not in self._shared:
            self._by_end[tenant, keys[-1]] = session
        self.gaps(tenant)
        self._by_silence[session.number] = session
        self._by_silence.move_to_end(session.number)
        return session

    def gaps(self, tenant: str) -> Gaps:
        """What was learned of a tenant."""
        gaps = self._gaps.get(tenant)
        if gaps is None:
            gaps = self._gaps[tenant] = Gaps()
        return gaps

    def expected(self, session: Session, now_s: float, within_s: float) -> NextTurn:
        """What is expected of a session's next turn."""
        silent_s = now_s - session.last_s
        return self.gaps(session.tenant).next_turn(session.turn, session.pace, silent_s, within_s)

    def look(self, now_s: float) -> tuple[list[tuple[Session, NextTurn]], list[Session]]:
        """Learn from silence: what is expected of each session, and those that are given up.

        The horizon of `soon` is a typical gap of the session's tenant.
        """
        expected: list[tuple[Session, NextTurn]] = []
        gone: list[Session] = []
        silent: dict[str, list[Silent]] = {tenant: [] for tenant in self._gaps}
        horizons = {tenant: gaps.typical_s for tenant, gaps in self._gaps.items()}
        surplus = len(self) - self._most
        for session in self:
            tenant = session.tenant
            turn = self.expected(session, now_s, horizons[tenant])
            given_up = turn.comes < _GIVEN_UP and self._gaps[tenant].seen >= _LEAST_GAPS
            if not session.busy and (given_up or len(gone) < surplus):
                gone.append(session)
                self._gaps[tenant].observe_end(session.turn)
            else:
                expected.append((session, turn))
                silent_s = now_s - session.last_s
                silent[tenant].append(Silent(session.turn, session.pace, silent_s, turn.comes))
        for tenant, sessions in silent.items():
            self._gaps[tenant].silent(sessions)
        for session in gone:
            del self._by_silence[session.number]
            end = session.tenant, session.keys[-1]
            if self._by_end.get(end) is session:
                del self._by_end[end]
        return expected, gone

    def _continued(self, keys: Sequence[int], tenant: str) -> Session | None:
        following: int | None = None
        for key in reversed(keys):
            if following is not None and self._went_on.get(key, following) != following:
                self._shared.add(key)
                self._by_end.pop((tenant, key), None)
            session = self._by_end.pop((tenant, key), None)
            if session is not None:
                if following is not None:
                    self._went_on[key] = following
                    if len(self._went_on) > self._most:
                        self._shared.discard(self._went_on.popitem(last=False)[0])
                return session
            following = key
        return None
