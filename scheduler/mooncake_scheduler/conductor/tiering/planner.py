"""Which blocks leave DRAM for SSD and which come back before they are needed. Pure: no clock, no I/O.

A turn waits for what must come from SSD, in proportion to it. Summed over all turns it does not matter whose
blocks lie there, only how probable a turn is; but a wait that one long conversation bears alone is felt,
and many small ones are not. So what is kept small is the sum of squares: a block's worth is the probability
that its session's next turn comes soon, times the blocks that turn would have to wait for. Demotion takes the
block of least worth, from the end of a prompt; promotion brings back the one of most worth, where it
exceeds what it displaces and the turn is probable enough to come at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple, TypeAlias

from mooncake_scheduler.conductor.tiering.gaps import NextTurn
from mooncake_scheduler.conductor.tiering.scores import Scores
from mooncake_scheduler.conductor.tiering.sessions import Session, Sessions

ADVANTAGE = 2.0
"""A promoted block must be worth so many times what it displaces: else both come and go."""


PLAN_EVERY_S = 1.0
"""Model seconds between two plans of what to read ahead."""
READ_AHEAD_SHARE = 0.25
"""Of what the SSDs read meanwhile: a turn that needs them waits no longer than that."""
FRESH_S = 0.5
"""Expectations are worked out again when they are older."""
SLACK = 0.02
"""Share of DRAM: with less of it free, a promotion has to displace something."""
_LOOK_AHEAD = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Shares of a typical gap at which it is asked how long a promoted block would stay."""

_RISE, _FALL = 0.3, 0.03
"""Weights of a new level: what is promoted has to outlast the next burst, too."""

Expected: TypeAlias = Sequence[tuple[Session, NextTurn]]


class Promotion(NamedTuple):
    """Blocks of one session that are wanted in DRAM."""

    session: Session
    first: int
    """Place of the first of them in the session's prompt."""
    keys: Sequence[int]


class Planner:
    """Decides over the DRAM of one store.

    A session holds its prompt in DRAM from the start up to a depth; a block that several sessions begin with
    stays as long as one of them holds it.

    Args:
        sessions: who may come again, and when.
        capacity_blocks: that fit into DRAM.
        scores: of past promotions.
    """

    def __init__(self, sessions: Sessions, capacity_blocks: int, scores: Scores | None = None) -> None:
        self.sessions = sessions
        self.capacity_blocks = capacity_blocks
        self.scores = scores or Scores()
        self._holders: dict[int, int] = {}
        self._planned_s = 0.0
        self._level = 0.0
        """Worth of the blocks that had to yield of late: a new prompt may offer its own for less."""
        self._looked: Expected = []
        self._looked_s: float | None = None

    @property
    def used_blocks(self) -> int:
        """Blocks in DRAM."""
        return len(self._holders)

    def holds(self, key: int) -> bool:
        """Whether a block is in DRAM, or on its way there."""
        return key in self._holders

    def turn(self, keys: Sequence[int], tenant: str, now_s: float) -> Session:
        """A prompt came; promotions made for it are scored.

        Args:
            keys: block keys of its full blocks; at least one.
            tenant: whose it is.
            now_s: when.
        """
        session = self.sessions.turn(keys, tenant, now_s)
        if session.promoted:
            there = sum([at_s is not None and at_s <= now_s for at_s in session.promoted.values()])
            self.scores.used(there, len(session.promoted) - there)
            session.promoted.clear()
        session.busy = True
        return session

    def stored(self, session: Session, now_s: float) -> list[int]:
        """The prompt's KV is in the store, all of it in DRAM; returns the keys that leave DRAM for it."""
        session.busy = False
        if session not in self.sessions:
            # Given up while this prompt was under way beside another one: nobody would ever make it yield.
            return []
        self._warm(session, len(session.keys))
        for key in session.keys:
            # What was dropped since has been written again.
            self._holders.setdefault(key, 1)
        left: list[int] = []
        if self.used_blocks > self.capacity_blocks:
            left = self._make_room(_Yielding(self._expected(now_s)))
        if self.used_blocks > self.capacity_blocks:
            # Those that came since the last look hold the rest.
            self._looked_s = None
            left += self._make_room(_Yielding(self._expected(now_s)))
        return left

    def given_up(self, session: Session) -> None:
        """The prompt was refused or failed: what lay in DRAM still does."""
        session.busy = False

    def promotions(self, now_s: float, most_blocks: int) -> tuple[list[Promotion], list[int]]:
        """What to read ahead now, counted as in DRAM from here on, and the keys that make room for it.

        Args:
            now_s: the time.
            most_blocks: that can be read before the next plan.
        """
        self.scores.forgive(now_s - self._planned_s)
        self._planned_s = now_s
        expected = self._expected(now_s)
        bar = self.scores.bar
        wanted = [
            (-turn.soon * s.cold, s.number, s, turn.soon)
            for s, turn in expected
            if turn.comes >= bar and s.cold and not s.busy
        ]
        heapify(wanted)
        yielding = _Yielding(expected)
        chosen: dict[int, Promotion] = {}
        left: list[int] = []
        budget = most_blocks
        while wanted and budget > 0:
            full = self.used_blocks >= (1 - SLACK) * self.capacity_blocks
            least = max(yielding.least, self._level) if full else 0.0
            if -wanted[0][0] <= ADVANTAGE * least:
                break
            _, number, session, worth = wanted[0]
            if session.cold == 0 or not self._stays(session, least, now_s):
                heappop(wanted)
                continue
            budget -= 1
            at = session.warm
            self._warm(session, at + 1)
            session.promoted[at] = None
            first = chosen[number].first if number in chosen else at
            chosen[number] = Promotion(session, first, session.keys[first : at + 1])
            heapreplace(wanted, (-worth * session.cold, number, session, worth))
            left += self._make_room(yielding)
        return list(chosen.values()), left

    def unread(self, now_s: float, since_s: float) -> list[Session]:
        """Sessions with blocks in DRAM that nobody has read for so long; they count as read from here on."""
        # The clock of the next Redis may be behind.
        due = [each for each in self.sessions if each.warm and not 0 <= now_s - each.read_s < since_s]
        for session in due:
            session.read_s = now_s
        return due

    def arrived(self, promotion: Promotion, now_s: float) -> None:
        """A promotion's blocks are in DRAM."""
        promoted = promotion.session.promoted
        for at in range(promotion.first, promotion.first + len(promotion.keys)):
            if at in promoted:
                promoted[at] = now_s

    def found(
        self, promotion: Promotion, brought: Collection[int], there: Collection[int], now_s: float
    ) -> None:
        """What a store had of a session that was to be promoted, where this planner does not see its DRAM.

        Args:
            promotion: the session's.
            brought: keys of the session's blocks that lay on SSD, and are in DRAM now.
            there: keys of those that had been in DRAM all the time: nothing was won or lost by them.
            now_s: when.
        """
        session = promotion.session
        promoted = session.promoted
        # What yielded meanwhile has its verdict.
        for at, key in enumerate(session.keys[: session.warm]):
            if key in brought:
                promoted[at] = now_s
            elif key in there:
                promoted.pop(at, None)

    def dropped(self, keys: Iterable[int]) -> None:
        """The store has lost these blocks, in every tier."""
        for key in keys:
            self._holders.pop(key, None)

    def close(self) -> None:
        """Nothing more comes: what was promoted and never used was promoted for nothing."""
        for session in self.sessions:
            self.scores.lost(len(session.promoted))
            session.promoted.clear()

    def _stays(self, session: Session, least: float, now_s: float) -> bool:
        """Whether the turn probably comes before the block would have to yield again."""
        horizon_s = self.sessions.gaps(session.tenant).typical_s
        stays_s = horizon_s * _LOOK_AHEAD[0]
        for share in _LOOK_AHEAD:
            later = self.sessions.expected(session, now_s + share * horizon_s, horizon_s)
            if later.soon * session.cold < least:
                break
            stays_s = share * horizon_s
        return self.sessions.expected(session, now_s, stays_s).soon >= self.scores.bar

    def _expected(self, now_s: float) -> Expected:
        if self._looked_s is None or not 0 <= now_s - self._looked_s < FRESH_S:
            self._looked, gone = self.sessions.look(now_s)
            self._looked_s = now_s
            for session in gone:
                self._cool(session, 0)
        return self._looked

    def _make_room(self, yielding: _Yielding) -> list[int]:
        left: list[int] = []
        level = 0.0
        while self.used_blocks > self.capacity_blocks:
            level = yielding.least
            session = yielding.take()
            if session is None:
                break
            left += self._cool(session, session.warm - 1)
        if left:
            weight = _RISE if level > self._level else _FALL
            self._level += weight * (level - self._level)
        return left

    def _warm(self, session: Session, depth: int) -> None:
        holders = self._holders
        for key in session.keys[session.warm : depth]:
            holders[key] = holders.get(key, 0) + 1
        session.warm = depth

    def _cool(self, session: Session, depth: int) -> list[int]:
        """A session holds no more than so many blocks; returns those that nobody holds any longer."""
        left, holders = [], self._holders
        for at in range(session.warm - 1, depth - 1, -1):
            key = session.keys[at]
            count = holders.get(key, 0)
            if count > 1:
                holders[key] = count - 1
            elif count:
                del holders[key]
                left.append(key)
            if at in session.promoted:
                del session.promoted[at]
                self.scores.lost(1)
        session.warm = depth
        return left


class _Yielding:
    """Sessions by the worth of the next block they would give up, least first."""

    def __init__(self, expected: Expected) -> None:
        self._heap = [
            (turn.soon * (s.cold + 1), s.number, s, turn.soon)
            for s, turn in expected
            if s.warm and not s.busy
        ]
        heapify(self._heap)

    @property
    def least(self) -> float:
        """The worth of the block that goes next."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self) -> Session | None:
        """The session that gives up its next block; None where none has one."""
        heap = self._heap
        if not heap:
            return None
        _, number, session, worth = heap[0]
        if session.warm > 1:
            heapreplace(heap, (worth * (session.cold + 2), number, session, worth))
        else:
            heappop(heap)
        return session
