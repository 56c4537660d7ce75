"""From a request to a reserved place: asks the Conductor, takes the reservation."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import TypeAlias

import msgspec

from mooncake_core.index import Depth
from mooncake_core.ledger import InstanceLoad, Limits, RefusalReason, Reservation
from mooncake_core.registry import Instance
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.model import Ask, NoInstanceError, Placement, Refused, Stage, World
from mooncake_scheduler.conductor.placement import may_pair
from mooncake_scheduler.gateway.decisions import Decision
from mooncake_scheduler.gateway.engines import pairs
from mooncake_scheduler.gateway.errors import ErrorAnswer, no_instance, overloaded
from mooncake_scheduler.gateway.roster import Roster, Team
from mooncake_scheduler.gateway.turns import LEAD_S, Turns
from mooncake_scheduler.gateway.worlds import Worlds
from mooncake_scheduler.metrics import GatewayMetrics

ReserveLocally: TypeAlias = Callable[[Reservation, Limits, float], RefusalReason | None]
_IDLE = InstanceLoad()
BEHIND_OTHERS_S = 1e6
"""More work than is ever ahead of a prefill: it waits only where somebody else waits."""


class Placer:
    """Places requests on the instances of a roster.

    Args:
        conductor: decides.
        roster: who is there.
        clock: model seconds.
        worlds: what is known of the instances.
        reserve_locally: what `reserve` of a shared ledger is replaced by while that one is away.
        metrics: counts what deciding and reserving take.
        turns: where prefills wait; None = nobody ever does.
    """

    def __init__(
        self,
        conductor: Conductor,
        roster: Roster,
        clock: Clock,
        worlds: Worlds,
        reserve_locally: ReserveLocally | None = None,
        metrics: GatewayMetrics | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.conductor = conductor
        self.roster = roster
        self.clock = clock
        self.worlds = worlds
        self._reserve_locally = reserve_locally
        self._metrics = metrics or GatewayMetrics()
        self.turns = turns

    async def place(
        self,
        ask: Ask,
        depths: Mapping[str, Depth],
        *,
        whole: bool,
        excluded: Collection[str] = (),
        again: bool = False,
        degraded: bool = True,
    ) -> tuple[Placement, World]:
        """Choose instances and reserve them.

        Args:
            ask: the request.
            depths: who holds how much of its prompt, in blocks.
            whole: one engine must serve it from start to end.
            excluded: ids that must not be chosen.
            again: it was admitted before: it is not refused any more. Where the bounds do not let it in it is
                promised nothing, so that it comes after all that were.
            degraded: without prefill instances an engine that decodes may do it all. Not where they are
                merely full: decode would be slowed down for everybody.

        Returns:
            The placement, and the world it was chosen from (for `explain`).

        Raises:
            ErrorAnswer: 503 without an instance; 429 when it is refused.
        """
        metrics = self._metrics
        for _ in range(2):
            began_s = time.monotonic()
            decision, world = self._decide(ask, depths, whole=whole, excluded=excluded, degraded=degraded)
            decided_s = time.monotonic()
            metrics.decide_s.observe(decided_s - began_s)
            placement = self._admitted(decision, world, again=again)
            if not again and self.conductor.checks_stages:
                self._check_start(ask, placement, world)
            # Only what is placed again is here although it was refused.
            limits = Limits() if isinstance(decision, Refused) else self.worlds.limits(ask, placement, world)
            reason = await self._take(ask, placement, world, limits)
            metrics.reserve_s.observe(time.monotonic() - decided_s)
            if reason is None:
                return placement, world
            # Another scheduler was quicker: look again, with the ledger as it is now.
            await self._refresh_ledger()
        assert reason is not None
        if again:
            placement = msgspec.structs.replace(placement, promised_ttft_s=inf)
            await self._take(ask, placement, world, Limits())
            return placement, world
        refused = self.conductor.lost(reason, ask, placement, self.worlds.scene(placement, world))
        raise overloaded(refused, world, self.clock.scale)

    async def _take(
        self, ask: Ask, placement: Placement, world: World, limits: Limits
    ) -> RefusalReason | None:
        """Reserve a placement; the bound that did not hold any more, if any."""
        reservation = self.conductor.reservation(
            ask, placement, world.now_s, waits_above_s=self._waits_above_s(placement, world)
        )
        with self.worlds.asking(reservation):
            return await self.reserve(reservation, limits, world.now_s)

    def _waits_above_s(self, placement: Placement, world: World) -> float:
        """From how much work ahead of it on a prefill waits for its turn; inf = never.

        Without an order nobody makes others wait. But where a scheduler that has one lets somebody wait (in a
        rolling change some have one and some do not), who went past those that wait would starve them.
        """
        prefill = placement.prefill
        if self.turns is None or prefill is None:
            return inf
        if self.conductor.order is None or not world.cost.of(prefill).knows_prefill:
            return BEHIND_OTHERS_S
        return LEAD_S * self.clock.scale

    def check_decode(self, ask: Ask, placement: Placement, world: World) -> ErrorAnswer | None:
        """Whether decode may start now that the prefill has ended, before the ledger is told of that.

        Args:
            ask: the request.
            placement: where it runs.
            world: what the placement was made in.

        Returns:
            429 when there is no room; None when it may start.
        """
        reservation = self.conductor.reservation(ask, placement, world.now_s)
        scene = self.worlds.scene(placement, world, without=reservation)
        refused = self.conductor.check_stage(Stage.DECODE, ask, placement, scene)
        return None if refused is None else overloaded(refused, world, self.clock.scale)

    def _check_start(self, ask: Ask, placement: Placement, world: World) -> None:
        """Mode `none`: prefill looks for itself, and so does decode where one engine does it all."""
        stages = [Stage.PREFILL] if placement.prefill is not None else [Stage.PREFILL, Stage.DECODE]
        for stage in stages:
            refused = self.conductor.check_stage(stage, ask, placement, world)
            if refused is not None:
                raise overloaded(refused, world, self.clock.scale)

    def no_place(
        self, reason: RefusalReason, ask: Ask, placement: Placement, world: World, waited_s: float
    ) -> ErrorAnswer:
        """429 for a request that found no place to decode while its time lasted.

        Args:
            reason: what was full.
            ask: the request.
            placement: where it was prefilled.
            world: what that was decided on.
            waited_s: model seconds since it came.
        """
        refused = self.conductor.lost(reason, ask, placement, self.worlds.scene(placement, world))
        refused = msgspec.structs.replace(refused, ttft_s=waited_s + placement.tbt_s)
        return overloaded(refused, world, self.clock.scale)

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """Reserve in the shared ledger, or in this process's own table while that one is away."""
        try:
            return await self.worlds.ledger.reserve(reservation, limits, now_s)
        except ConnectionError:
            if self._reserve_locally is None:
                raise
            return self._reserve_locally(reservation, limits, now_s)

    async def reserve_decode(self, ask: Ask, placement: Placement) -> None:
        """Reserve a decode instance for a request whose prompt is computed: it was admitted before."""
        now_s = self.clock.now_s()
        end_s = now_s + ask.output_tokens * placement.tbt_s
        need_tokens = ask.prompt_tokens + ask.output_tokens
        decode = placement.decode.id
        # A place there is asked for when it is reserved (`Ledger.seat`), where places are bounded at all.
        reservation = Reservation(ask.id, None, 0.0, decode, need_tokens, now_s, end_s, ask.tenant)
        await self.reserve(reservation, Limits(), now_s)

    def _admitted(self, decision: Placement | Refused, world: World, *, again: bool) -> Placement:
        if not isinstance(decision, Refused):
            return decision
        if not again or decision.placement is None:
            raise overloaded(decision, world, self.clock.scale)
        return decision.placement

    def another_decode(self, prefill: Instance, excluded: Collection[str]) -> Instance | None:
        """The least loaded decode instance that can take what `prefill` has staged; None without one."""
        loads = self.worlds.ledger.loads(self.clock.now_s())
        able = [
            instance
            for team in self.roster.teams(excluded)
            for instance in team.decode
            if instance.id != prefill.id and pairs(prefill, instance) and may_pair(prefill, instance)
        ]

        def promised(instance: Instance) -> int:
            load = self.worlds.with_foreign(instance.id, loads.get(instance.id, _IDLE))
            return load.batch + load.arriving

        return min(able, key=promised, default=None)

    async def _refresh_ledger(self) -> None:
        try:
            await self.worlds.ledger.refresh(self.clock.now_s())
        except ConnectionError:
            return

    def explained(self, decision: Decision) -> Placement | None:
        """The placement of a past decision, with all candidates as they were seen then."""
        placement, world, ask = decision.placement, decision.world, decision.ask
        if placement is None or world is None or ask is None:
            return placement
        try:
            return self.conductor.explain(ask, world, placement)
        except NoInstanceError:
            return placement

    def _decide(
        self, ask: Ask, depths: Mapping[str, Depth], *, whole: bool, excluded: Collection[str], degraded: bool
    ) -> tuple[Placement | Refused, World]:
        best: tuple[Placement | Refused, World] | None = None
        teams = [self.roster.wholes(excluded)] if whole else self.roster.teams(excluded)
        for team in teams:
            found = self._decide_in(ask, team, depths)
            if found is not None and (best is None or _better(found[0], best[0])):
                best = found
        if best is None and degraded and not whole:
            best = self._decide_in(ask, self.roster.wholes(excluded), depths)
        if best is None:
            raise no_instance()
        return best

    def _decide_in(
        self, ask: Ask, team: Team, depths: Mapping[str, Depth]
    ) -> tuple[Placement | Refused, World] | None:
        if not team.prefill or not team.decode:
            return None
        world = self.worlds.of(ask, team, depths)
        try:
            return self.conductor.decide(ask, world), world
        except NoInstanceError:
            return None


def _better(one: Placement | Refused, other: Placement | Refused) -> bool:
    if isinstance(one, Refused) != isinstance(other, Refused):
        return isinstance(other, Refused)
    return one.ttft_s < other.ttft_s
