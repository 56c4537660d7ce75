"""Late binding: a prefill that waits at one instance is moved to another that runs out of work.

Each scheduler looks after its own requests; the ledger lets only one of all move to the same instance
(`Ledger.move`). Nothing was sent for a request that waits, so a move is no retry.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import inf

from mooncake_core.index import Depth
from mooncake_core.ledger import Ledger, Waiting
from mooncake_core.registry import InstanceState, Role
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.model import Ask, InstanceView, Placement
from mooncake_scheduler.conductor.rebinding import MOST_MOVES, Move, Rebinding, Standing
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.gateway.turns import LEAD_S, MIRROR_S, InLine, Turns, serves


class Binding:
    """A request's tie to its prefill instance, while it waits there.

    Args:
        ask: the request.
        placement: where it is bound.
        depths: who holds how much of its prompt, in blocks, as of its arrival.
    """

    __slots__ = ("ask", "depths", "moves", "not_before_s", "placement")

    def __init__(self, ask: Ask, placement: Placement, depths: Mapping[str, Depth]) -> None:
        self.ask = ask
        self.placement = placement
        self.depths = depths
        self.moves = 0
        self.not_before_s = -inf
        """Others were quicker: until then (monotonic) mirrors may not show it."""


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

    @property
    def ahead_s(self) -> float:
        """Model seconds of work that an instance may still have for others to be moved to it."""
        return LEAD_S * self._clock.scale

    def look(self, wall_s: float) -> None:
        """Offer those who wait an instance that runs out of work; call it as often as `Turns` looks.

        Args:
            wall_s: monotonic seconds.
        """
        if not self._turns.held:
            return
        offered: set[InLine] = set()
        for instance_id in self._with_room(wall_s):
            best = self._best(instance_id, offered, wall_s)
            if best is not None:
                offered.add(best[0])
                self._turns.offer(*best)

    async def take(self, binding: Binding, move: Move, wall_s: float) -> bool:
        """Move a request that waits for its turn; False where others were quicker, or the ledger is away."""
        now_s = self._clock.now_s()
        waiting = self._ledger.waiting(binding.ask.id)
        if waiting is None:
            return False
        reservation = self._placer.conductor.reservation(binding.ask, move.placement, waiting.reserved_s)
        binding.not_before_s = wall_s + MIRROR_S
        try:
            moved = await self._ledger.move(reservation, self.ahead_s, now_s)
        except ConnectionError:
            return False
        if moved:
            binding.placement = move.placement
            binding.moves += 1
        return moved

    def _with_room(self, wall_s: float) -> Sequence[str]:
        now_s, loads = self._clock.now_s(), self._ledger.loads(self._clock.now_s())
        return [
            member.instance.id
            for member in self._roster.members.values()
            if member.instance.role is Role.PREFILL
            and member.state is InstanceState.READY
            and serves(member, wall_s)
            and (
                member.instance.id not in loads
                or self._rebinding.has_room(self._placer.load(member.instance.id, now_s), self.ahead_s)
            )
        ]

    def _best(
        self, instance_id: str, offered: Collection[InLine], wall_s: float
    ) -> tuple[InLine, Move] | None:
        now_s = self._clock.now_s()
        there = self._roster.members[instance_id].instance
        standings: dict[str, dict[Waiting, Standing]] = {}
        best: tuple[InLine, Move] | None = None
        for held in chain.from_iterable(self._turns.lines.values()):
            binding, here = held.binding, held.member.instance.id
            if binding is None or here == instance_id or held in offered:
                continue
            if binding.moves >= MOST_MOVES or wall_s < binding.not_before_s:
                continue
            if not engines.pairs(there, binding.placement.decode):
                continue
            if here not in standings:
                load = self._placer.load(here, now_s)
                standings[here] = self._rebinding.standings(load, now_s)
            standing = standings[here].get(held.waiting)
            if standing is None:
                continue
            view: InstanceView = self._placer.view(there, binding.depths)
            costs = self._placer.conductor.costs
            move = self._rebinding.move(
                binding.ask, binding.placement, held.waiting, standing, view, costs, now_s
            )
            if move is not None and (best is None or move.worth_s > best[1].worth_s):
                best = held, move
        return best
