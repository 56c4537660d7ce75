"""From a request to a reserved place: gathers what is known, asks the Conductor, takes the reservation."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TypeAlias

import msgspec

from mooncake_core.config.scheduler import SloConfig
from mooncake_core.index import Depth
from mooncake_core.ledger import InstanceLoad, Ledger, Limits, RefusalReason, Reservation
from mooncake_core.registry import Instance
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels, class_of
from mooncake_scheduler.conductor.model import (
    Ask,
    InstanceView,
    NoInstanceError,
    Placement,
    Refused,
    Slo,
    Stage,
    World,
)
from mooncake_scheduler.conductor.placement import may_pair
from mooncake_scheduler.conductor.prediction import without_arriving
from mooncake_scheduler.conductor.reports import NOTHING, Foreign, with_foreign, within_ledger
from mooncake_scheduler.conductor.targets import targets_of
from mooncake_scheduler.gateway.decisions import Decision
from mooncake_scheduler.gateway.engines import pairs
from mooncake_scheduler.gateway.errors import ErrorAnswer, no_instance, overloaded
from mooncake_scheduler.gateway.reported import Reported
from mooncake_scheduler.gateway.roster import Roster, Team
from mooncake_scheduler.gateway.turns import LEAD_S, Turns
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
        ledger: what is promised.
        clock: model seconds.
        slo: the targets.
        reserve_locally: what `reserve` of a shared ledger is replaced by while that one is away.
        metrics: counts what deciding and reserving take.
        turns: where prefills wait; None = nobody ever does.
    """

    def __init__(
        self,
        conductor: Conductor,
        roster: Roster,
        ledger: Ledger,
        clock: Clock,
        slo: SloConfig,
        reserve_locally: ReserveLocally | None = None,
        metrics: GatewayMetrics | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.conductor = conductor
        self.roster = roster
        self.ledger = ledger
        self.clock = clock
        self._reserve_locally = reserve_locally
        self._metrics = metrics or GatewayMetrics()
        self.turns = turns
        self._asked_for: dict[str, tuple[int, float]] = {}
        """Prefills that the ledger is being asked for, and their seconds, by instance."""
        self.reported = Reported()
        self._models: dict[str, CostModel] = {}
        self._frozen_costs = CostModels()
        self._blanks: dict[str, InstanceView] = {}
        self._slo_config = slo
        self._slo = Slo(slo.ttft_s, slo.tbt_s)
        self._relative = slo.ttft_multiplier is not None or slo.tbt_multiplier is not None

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
            limits = Limits() if isinstance(decision, Refused) else self._limits(ask, placement, world)
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
        refused = self.conductor.lost(reason, ask, placement, self._scene(placement, world))
        raise overloaded(refused, world, self.clock.scale)

    async def _take(
        self, ask: Ask, placement: Placement, world: World, limits: Limits
    ) -> RefusalReason | None:
        """Reserve a placement; the bound that did not hold any more, if any."""
        reservation = self.conductor.reservation(
            ask, placement, world.now_s, waits_above_s=self._waits_above_s(placement, world)
        )
        with self._asking(reservation):
            return await self.reserve(reservation, limits, world.now_s)

    @contextmanager
    def _asking(self, reservation: Reservation) -> Iterator[None]:
        """Until the ledger has answered, others that are placed here see what is asked for as taken."""
        instance = reservation.prefill or reservation.decode
        queued, queued_s = self._asked_for.get(instance, (0, 0.0))
        self._asked_for[instance] = queued + 1, queued_s + reservation.prefill_cost_s
        try:
            yield
        finally:
            queued, queued_s = self._asked_for[instance]
            if queued == 1:
                del self._asked_for[instance]
            else:
                self._asked_for[instance] = queued - 1, queued_s - reservation.prefill_cost_s

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
        scene = self._scene(placement, world, without=reservation)
        refused = self.conductor.check_stage(Stage.DECODE, ask, placement, scene)
        return None if refused is None else overloaded(refused, world, self.clock.scale)

    def _check_start(self, ask: Ask, placement: Placement, world: World) -> None:
        """Mode `none`: prefill looks for itself, and so does decode where one engine does it all."""
        stages = [Stage.PREFILL] if placement.prefill is not None else [Stage.PREFILL, Stage.DECODE]
        for stage in stages:
            refused = self.conductor.check_stage(stage, ask, placement, world)
            if refused is not None:
                raise overloaded(refused, world, self.clock.scale)

    def _scene(self, placement: Placement, world: World, without: Reservation | None = None) -> World:
        """A placement's two instances as they are now, with the targets it was made for."""
        now_s = self.clock.now_s()
        views = []
        for instance in (placement.prefill or placement.decode, placement.decode):
            load = self.ledger.load(instance.id, now_s)
            if without is not None and instance is placement.decode:
                load = without_arriving(load, without)
            views.append(InstanceView(instance, self._with_foreign(instance.id, load)))
        return World(now_s, views[:1], views[1:], world.cost, world.slo)

    def view(self, instance: Instance, load: InstanceLoad, depths: Mapping[str, Depth]) -> InstanceView:
        """One instance with a load (`full_load`), for a prompt that others hold so deep (in blocks)."""
        return self._view(instance, {instance.id: load}, depths)

    def full_load(self, instance_id: str, now_s: float) -> InstanceLoad:
        """The load of one instance as placing sees it: `load`, and what the ledger is being asked for."""
        return self._with_asked_for(instance_id, self.load(instance_id, now_s))

    def load(self, instance_id: str, now_s: float) -> InstanceLoad:
        """The load of one instance, strangers' work included."""
        return self._with_foreign(instance_id, self.ledger.load(instance_id, now_s))

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
        refused = self.conductor.lost(reason, ask, placement, self._scene(placement, world))
        refused = msgspec.structs.replace(refused, ttft_s=waited_s + placement.tbt_s)
        return overloaded(refused, world, self.clock.scale)

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """Reserve in the shared ledger, or in this process's own table while that one is away."""
        try:
            return await self.ledger.reserve(reservation, limits, now_s)
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
        loads = self.ledger.loads(self.clock.now_s())
        able = [
            instance
            for team in self.roster.teams(excluded)
            for instance in team.decode
            if instance.id != prefill.id and pairs(prefill, instance) and may_pair(prefill, instance)
        ]

        def promised(instance: Instance) -> int:
            load = self._with_foreign(instance.id, loads.get(instance.id, _IDLE))
            return load.batch + load.arriving

        return min(able, key=promised, default=None)

    async def _refresh_ledger(self) -> None:
        try:
            await self.ledger.refresh(self.clock.now_s())
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
        world = self._world(ask, team, depths)
        try:
            return self.conductor.decide(ask, world), world
        except NoInstanceError:
            return None

    def _world(self, ask: Ask, team: Team, depths: Mapping[str, Depth]) -> World:
        now_s = self.clock.now_s()
        loads = self._loads(now_s)
        prefill = [self._view(instance, loads, depths) for instance in team.prefill]
        if team.decode is team.prefill:
            decode = prefill
        else:
            # An instance of role both is one view in both lists: the policy compares by identity.
            seen = {view.instance.id: view for view in prefill}
            decode = [
                seen.get(instance.id) or self._view(instance, loads, depths) for instance in team.decode
            ]
        costs = self._costs_now(team)
        slo = self._slo
        if self._relative:
            first, last = costs.of(prefill[0].instance), costs.of(decode[0].instance)
            slo = targets_of(self._slo_config, ask.prompt_tokens, ask.output_tokens, first, last)
        return World(now_s, prefill, decode, costs, slo)

    def _costs_now(self, team: Team) -> CostModels:
        """The cost models as they are: later fitting must not change what a decision is explained by."""
        live, models = self.conductor.costs, self._models
        for instance in team.classes:
            if models.get(class_of(instance)) is not live.of(instance):
                self._models = models | {class_of(each): live.of(each) for each in team.classes}
                self._frozen_costs = CostModels(self._models)
                break
        return self._frozen_costs

    def _loads(self, now_s: float) -> Mapping[str, InstanceLoad]:
        """The ledger's loads by instance, raised by what engines report and by what it is being asked for."""
        loads = self.ledger.loads(now_s)
        raised = self.reported.foreign.keys() | self._asked_for.keys()
        if not raised:
            return loads
        loads = dict(loads)
        for name in raised:
            load = self._with_foreign(name, loads.get(name, _IDLE))
            loads[name] = self._with_asked_for(name, load)
        return loads

    def _with_asked_for(self, instance_id: str, load: InstanceLoad) -> InstanceLoad:
        asked_for = self._asked_for.get(instance_id)
        return load if asked_for is None else with_foreign(load, Foreign(*asked_for))

    def _with_foreign(self, instance_id: str, load: InstanceLoad) -> InstanceLoad:
        """A load as the ledger knows it, raised by what the engine reports beyond that."""
        foreign = self.reported.foreign.get(instance_id)
        return load if foreign is None else with_foreign(load, foreign)

    def _limits(self, ask: Ask, placement: Placement, world: World) -> Limits:
        """The bounds that the ledger checks again: what it does not know of takes its part of them."""
        limits = self.conductor.limits(ask, placement, world)
        foreign = self.reported.foreign
        if not foreign:
            return limits
        prefill = placement.prefill or placement.decode
        return within_ledger(
            limits, foreign.get(prefill.id, NOTHING), foreign.get(placement.decode.id, NOTHING)
        )

    def _view(
        self, instance: Instance, loads: Mapping[str, InstanceLoad], depths: Mapping[str, Depth]
    ) -> InstanceView:
        name = instance.id
        load = loads.get(name, _IDLE)
        held = depths[name].hbm if name in depths else 0
        stored = depths.get(instance.store) if instance.fetch == "store" else None
        if not held and stored is None:
            # Most often the same as a moment ago: a frozen object is costly to make.
            blank = self._blanks.get(name)
            if blank is None or blank.load is not load or blank.instance is not instance:
                blank = self._blanks[name] = InstanceView(instance, load)
            return blank
        fetchable = held
        on_ssd = inbound = leaving = 0
        if stored is not None and stored.ssd > held:
            fetchable = stored.ssd
            on_ssd = stored.ssd - (stored.dram if stored.dram > held else held)
            inbound = self.roster.members[name].inbound_flows
            leaving = self.roster.source_flows.get(instance.store, 0)
        size = instance.block_size_tokens
        return InstanceView(instance, load, held * size, fetchable * size, on_ssd * size, inbound, leaving)


def _better(one: Placement | Refused, other: Placement | Refused) -> bool:
    if isinstance(one, Refused) != isinstance(other, Refused):
        return isinstance(other, Refused)
    return one.ttft_s < other.ttft_s
