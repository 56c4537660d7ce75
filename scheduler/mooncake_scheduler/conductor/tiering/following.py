"""Steering a store that makes room by a rule of its own: what was read longest ago leaves DRAM. Pure.

Nobody outside can tell such a store what to demote (Mooncake 0.3.13 offers soft pins on `put` alone). What it
offers is to look a block up: that counts as reading it, so that it stays, and twice in a row brings it back
from SSD. That is enough: what the planner would keep is looked up now and then, and what leaves DRAM is what
it would have demoted. Its order is kept for most of DRAM only, the rest is what turns over meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from mooncake_scheduler.conductor.tiering.planner import Planner, Promotion
from mooncake_scheduler.conductor.tiering.scores import Scores
from mooncake_scheduler.conductor.tiering.sessions import Session, Sessions

STEERED_SHARE = 0.85
"""Of the DRAM, that the planner counts on: in the rest lies what was read last and what goes next."""
KEEP_EVERY_S = 5.0
"""Blocks that shall stay are looked up when nobody has for so long."""
RUN_TOKENS = 512
"""Planning goes by runs of so many tokens: engines' blocks are far smaller than a plan need be fine."""
MOST_SESSIONS = 4_000
_ENDS_WITHIN_S = 3_600.0
"""Of whose end nothing was heard for so long, it was not told."""
_MOST_WISHES = 1_000


class Wish(NamedTuple):
    """Blocks of one session that shall lie in DRAM: from its start, or what joins those wanted before."""

    number: int
    """By which the answers are told apart, from 1."""
    keys: Sequence[int]


class _UnderWay(NamedTuple):
    session: Session
    came_s: float


class _Asked(NamedTuple):
    promotion: Promotion
    turn: int
    """Of the session, when it was asked for: with the next one it is judged."""


class Following:
    """Follows the DRAM of one store, and plans what to read ahead.

    Args:
        block_size_tokens: of the engines.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self.run_blocks = max(1, RUN_TOKENS // block_size_tokens)
        """Blocks of a run."""
        self._planner = Planner(Sessions(MOST_SESSIONS), 0)
        self._under_way: OrderedDict[str, _UnderWay] = OrderedDict()
        self._keys: dict[int, Sequence[int]] = {}
        """All block keys of each session's latest prompt, by the session's number."""
        self._begun: dict[int, int] = {}
        """Turn of each session, by its number, of which the start was wanted already."""
        self._asked: OrderedDict[int, _Asked] = OrderedDict()
        self._wishes = 0

    @property
    def sessions(self) -> int:
        """Conversations that may go on."""
        return len(self._planner.sessions)

    @property
    def used_runs(self) -> int:
        """Runs in DRAM that it counts on."""
        return self._planner.used_blocks

    @property
    def scores(self) -> Scores:
        """What became of what was read ahead, in runs."""
        return self._planner.scores

    def resize(self, capacity_blocks: float) -> None:
        """So many blocks fit into the store's DRAM."""
        self._planner.capacity_blocks = int(STEERED_SHARE * capacity_blocks / self.run_blocks)

    def came(self, request: str, tenant: str, keys: Sequence[int], now_s: float) -> None:
        """A prompt was placed.

        Args:
            request: its name.
            tenant: whose it is.
            keys: block keys of its full blocks, from the start.
            now_s: when.
        """
        runs = keys[self.run_blocks - 1 :: self.run_blocks]
        if not runs:
            return
        session = self._planner.turn(runs, tenant, now_s)
        self._keys[session.number] = keys
        self._under_way[request] = _UnderWay(session, now_s)

    def ended(self, request: str, now_s: float, *, stored: bool) -> None:
        """It has ended; `stored`: its prompt was computed, so that the store has it."""
        under_way = self._under_way.pop(request, None)
        if under_way is None:
            return
        if stored:
            self._planner.stored(under_way.session, now_s)
        else:
            self._planner.given_up(under_way.session)

    def plan(self, now_s: float, most_blocks: float) -> list[Wish]:
        """What to read ahead now.

        Args:
            now_s: the time.
            most_blocks: that may be read before the next plan.
        """
        self._forget(now_s)
        wishes = []
        for promotion in self._planner.promotions(now_s, int(most_blocks / self.run_blocks))[0]:
            session = promotion.session
            self._wishes += 1
            self._asked[self._wishes] = _Asked(promotion, session.turn)
            keys = self._blocks(session)
            if self._begun.get(session.number) == session.turn:
                # Whoever brings blocks asks where each of them lies: of a whole prompt once only.
                keys = keys[promotion.first * self.run_blocks :]
            self._begun[session.number] = session.turn
            wishes.append(Wish(self._wishes, keys))
        return wishes

    def keep(self, now_s: float) -> list[int]:
        """Keys of blocks that are to be looked up so that they stay."""
        unread = self._planner.unread(now_s, KEEP_EVERY_S)
        # Once each: many conversations have their beginning in common.
        return list(dict.fromkeys(key for session in unread for key in self._blocks(session)))

    def found(
        self,
        number: int,
        brought: Collection[int],
        there: Collection[int],
        gone: Collection[int],
        now_s: float,
    ) -> None:
        """What somebody who looked has found of a wish; several may tell of one, each of a part.

        Args:
            number: of the wish.
            brought: keys of blocks that lay on SSD, and are in DRAM now.
            there: those that had been in DRAM already.
            gone: those that the store has no more.
            now_s: when.
        """
        asked = self._asked.get(number)
        if asked is None or asked.promotion.session.turn != asked.turn:
            return
        # A run is there with its last block, and late by its first: its name is its last block's key.
        self._planner.found(asked.promotion, brought, there, now_s)
        self._planner.dropped(gone)

    def _blocks(self, session: Session) -> Sequence[int]:
        """Those that are in DRAM, or shall be."""
        keys = self._keys[session.number]
        return keys if not session.cold else keys[: session.warm * self.run_blocks]

    def _forget(self, now_s: float) -> None:
        while self._under_way:
            request, oldest = next(iter(self._under_way.items()))
            if now_s - oldest.came_s < _ENDS_WITHIN_S:
                break
            self.ended(request, now_s, stored=False)
        while len(self._asked) > _MOST_WISHES:
            self._asked.popitem(last=False)
        if len(self._keys) > len(self._planner.sessions):
            living = {session.number for session in self._planner.sessions}
            self._keys = {number: keys for number, keys in self._keys.items() if number in living}
            self._begun = {number: turn for number, turn in self._begun.items() if number in living}
