"""Late binding: a prefill that waits at one instance is moved to another that runs out of work.

Each scheduler looks after its own requests; the ledger lets only one of all move to the same instance
(`Ledger.move`). Nothing was sent for a request that waits, so a move is no retry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from mooncake_core.index import Depth
from mooncake_core.ledger import InstanceLoad, Ledger
from mooncake_core.registry import Instance, InstanceState, Role
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.model import Ask, Placement
from mooncake_scheduler.conductor.placement import may_pair
from mooncake_scheduler.conductor.rebinding import MOST_MOVES, Move, Rebinding, Standing
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.gateway.turns import LEAD_S, MIRROR_S, InLine, Turns, serves

AWAY_S = 1.0
"""Wall seconds without offers after the ledger did not answer: who is offered something leaves its line."""
REST_S = 0.1
"""Wall seconds for which an instance is not looked at again where nobody gained by it."""
MOST_CANDIDATES = 64
"""Of those who wait, tried for an instance in one look: what it costs must not grow with the lines."""


class Binding:
    """A request's tie to its prefill instance, while it waits there.

    Args:
        ask: the request.
        placement: where it is bound.
        depths: who holds how much of its prompt, in blocks, as of its arrival.
    """

    __slots__ = ("ask", "depths", "moves", "not_before_s", "placement", "turn_from_s")

    def __init__(self, ask: Ask, placement: Placement, depths: Mapping[str, Depth]) -> None:
        self.ask = ask
        self.placement = placement
        self.depths = depths
        self.moves = 0
        self.not_before_s = -inf
        """Others were quicker: until then (monotonic) mirrors may not show it."""
        self.turn_from_s: float | None = None
        """From then on (monotonic) its turn may come where it waits; None = it has not waited yet."""


class _Candidate(NamedTuple):
    """One that waits and may be moved."""

    held: InLine
    binding: Binding
    standing: Standing
    hoped_s: float
    """What it would bring to move it to an instance with nothing to do that holds as much of its prompt."""


class LateBinding:
    """Looks for instances that run out of work while requests of this gateway wait elsewhere.

    Args:
        rebinding: decides.
        turns: who waits where.
        placer: what is known of an instance.
        roster: which are there.
        ledger: what is promised to them.
        clock: model seconds.
    """

    def __init__(
        self, rebinding: Rebinding, turns: Turns, placer: Placer, roster: Roster, ledger: Ledger, clock: Clock
    ) -> None:
        self._rebinding = rebinding
        self._turns = turns
        self._placer = placer
        self._roster = roster
        self._ledger = ledger
        self._clock = clock
        self._taken: set[str] = set()
        """Instances that somebody is being moved to."""
        self._rests_until_s: dict[str, float] = {}
        self._away_until_s = -inf

    @property
    def ahead_s(self) -> float:
        """Model seconds of work that an instance may still have for others to be moved to it."""
        return LEAD_S * self._clock.scale

    def look(self, wall_s: float) -> None:
        """Offer those who wait an instance that runs out of work; call it as often as `Turns` looks.

        Args:
            wall_s: monotonic seconds.
        """
        if not self._turns.held or wall_s < self._away_until_s:
            return
        self._rests_until_s = {name: until for name, until in self._rests_until_s.items() if until > wall_s}
        free = self._with_room(wall_s)
        if not free:
            return
        candidates = self._candidates(wall_s)
        for there, load in free:
            best = self._best(there, load, candidates)
            if best is None:
                self._rests_until_s[there.id] = wall_s + REST_S
                continue
            self._turns.offer(*best)
            # Who is offered something goes on at once, and may have found the ledger away.
            if wall_s < self._away_until_s:
                return

    async def take(self, binding: Binding, move: Move, wall_s: float) -> bool:
        """Move a request that waits for its turn; False where others were quicker, or the ledger is away."""
        now_s = self._clock.now_s()
        waiting = self._ledger.waiting(binding.ask.id)
        if waiting is None:
            return False
        reservation = self._placer.conductor.reservation(binding.ask, move.placement, waiting.reserved_s)
        binding.not_before_s = wall_s + MIRROR_S
        there = reservation.prefill or reservation.decode
        self._taken.add(there)
        try:
            moved = await self._ledger.move(reservation, self.ahead_s, now_s)
        except ConnectionError:
            self._away_until_s = time.monotonic() + AWAY_S
            return False
        finally:
            self._taken.discard(there)
        if moved:
            binding.placement = move.placement
            binding.moves += 1
            binding.turn_from_s = 0.0
        return moved

    def _with_room(self, wall_s: float) -> Sequence[tuple[Instance, InstanceLoad]]:
        """Instances that run out of work, and that nobody is being moved to."""
        now_s = self._clock.now_s()
        found = []
        for member in self._roster.members.values():
            instance = member.instance
            if instance.role is not Role.PREFILL or member.state is not InstanceState.READY:
                continue
            if instance.id in self._taken or instance.id in self._rests_until_s:
                continue
            load = self._placer.worlds.full_load(instance.id, now_s)
            if load.has_room(self.ahead_s) and serves(member, wall_s):
                found.append((instance, load))
        return found

    def _candidates(self, wall_s: float) -> list[_Candidate]:
        """Who may be moved, first who would bring most."""
        now_s = self._clock.now_s()
        found = []
        for here, line in self._turns.lines.items():
            standings = self._rebinding.standings(self._placer.worlds.load(here, now_s), now_s)
            for held in line:
                binding, standing = held.binding, standings.get(held.waiting)
                if binding is None or standing is None:
                    continue
                if binding.moves >= MOST_MOVES or wall_s < binding.not_before_s:
                    continue
                hoped_s = standing.end_s - held.waiting.cost_us / 1e6 + standing.relief_s
                found.append(_Candidate(held, binding, standing, hoped_s))
        found.sort(key=lambda each: each.hoped_s, reverse=True)
        return found

    def _best(
        self, there: Instance, load: InstanceLoad, candidates: Sequence[_Candidate]
    ) -> tuple[InLine, Move] | None:
        now_s, costs = self._clock.now_s(), self._placer.conductor.costs
        best: tuple[InLine, Move] | None = None
        for held, binding, standing, _ in islice(_able(there, candidates), MOST_CANDIDATES):
            view = self._placer.worlds.view(there, load, binding.depths)
            move = self._rebinding.move(
                binding.ask, binding.placement, held.waiting, standing, view, costs, now_s
            )
            if move is not None and (best is None or move.worth_s > best[1].worth_s):
                best = held, move
        return best


def _able(there: Instance, candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Those that still wait elsewhere and whose decode instance can take what an instance computes."""
    known: dict[str, bool] = {}
    for each in candidates:
        held = each.held
        if held.member.instance.id == there.id or held.handed_over or held.left or held.move is not None:
            continue
        decode = each.binding.placement.decode
        able = known.get(decode.id)
        if able is None:
            able = known[decode.id] = engines.pairs(there, decode) and may_pair(there, decode)
        if able:
            yield each
