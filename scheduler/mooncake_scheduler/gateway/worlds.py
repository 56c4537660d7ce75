"""What is known of instances at one moment, as the Conductor sees it: loads, prefixes, costs, targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mooncake_core.config.scheduler import SloConfig
from mooncake_core.index import Depth
from mooncake_core.ledger import InstanceLoad, Ledger, Limits, Reservation
from mooncake_core.registry import Instance
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels, class_of
from mooncake_scheduler.conductor.model import Ask, InstanceView, Placement, Slo, World
from mooncake_scheduler.conductor.prediction import without_arriving
from mooncake_scheduler.conductor.reports import NOTHING, Foreign, with_foreign, within_ledger
from mooncake_scheduler.conductor.targets import targets_of
from mooncake_scheduler.gateway.reported import Reported
from mooncake_scheduler.gateway.roster import Roster, Team

_IDLE = InstanceLoad()


class Worlds:
    """Joins what roster, ledger, engines' reports and cost models say.

    Args:
        conductor: knows the costs.
        roster: who is there.
        ledger: what is promised.
        clock: model seconds.
        slo: the targets.
    """

    def __init__(
        self, conductor: Conductor, roster: Roster, ledger: Ledger, clock: Clock, slo: SloConfig
    ) -> None:
        self._conductor = conductor
        self._roster = roster
        self.ledger = ledger
        self._clock = clock
        self.reported = Reported()
        self._asked_for: dict[str, tuple[int, float]] = {}
        """Prefills that the ledger is being asked for, and their seconds, by instance."""
        self._models: dict[str, CostModel] = {}
        self._frozen_costs = CostModels()
        self._blanks: dict[str, InstanceView] = {}
        self._slo_config = slo
        self._slo = Slo(slo.ttft_s, slo.tbt_s)
        self._relative = slo.ttft_multiplier is not None or slo.tbt_multiplier is not None

    def of(self, ask: Ask, team: Team, depths: Mapping[str, Depth]) -> World:
        """The world in which a request is placed on a team."""
        now_s = self._clock.now_s()
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

    def scene(self, placement: Placement, world: World, without: Reservation | None = None) -> World:
        """A placement's two instances as they are now, with the targets it was made for."""
        now_s = self._clock.now_s()
        views = []
        for instance in (placement.prefill or placement.decode, placement.decode):
            load = self.ledger.load(instance.id, now_s)
            if without is not None and instance is placement.decode:
                load = without_arriving(load, without)
            views.append(InstanceView(instance, self.with_foreign(instance.id, load)))
        return World(now_s, views[:1], views[1:], world.cost, world.slo)

    def view(self, instance: Instance, load: InstanceLoad, depths: Mapping[str, Depth]) -> InstanceView:
        """One instance with a load (`full_load`), for a prompt that others hold so deep (in blocks)."""
        return self._view(instance, {instance.id: load}, depths)

    def full_load(self, instance_id: str, now_s: float) -> InstanceLoad:
        """The load of one instance as placing sees it: `load`, and what the ledger is being asked for."""
        return self._with_asked_for(instance_id, self.load(instance_id, now_s))

    def load(self, instance_id: str, now_s: float) -> InstanceLoad:
        """The load of one instance, strangers' work included."""
        return self.with_foreign(instance_id, self.ledger.load(instance_id, now_s))

    def limits(self, ask: Ask, placement: Placement, world: World) -> Limits:
        """The bounds that the ledger checks again: what it does not know of takes its part of them."""
        limits = self._conductor.limits(ask, placement, world)
        foreign = self.reported.foreign
        if not foreign:
            return limits
        prefill = placement.prefill or placement.decode
        return within_ledger(
            limits, foreign.get(prefill.id, NOTHING), foreign.get(placement.decode.id, NOTHING)
        )

    @contextmanager
    def asking(self, reservation: Reservation) -> Iterator[None]:
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

    def _costs_now(self, team: Team) -> CostModels:
        """The cost models as they are: later fitting must not change what a decision is explained by."""
        live, models = self._conductor.costs, self._models
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
            load = self.with_foreign(name, loads.get(name, _IDLE))
            loads[name] = self._with_asked_for(name, load)
        return loads

    def _with_asked_for(self, instance_id: str, load: InstanceLoad) -> InstanceLoad:
        asked_for = self._asked_for.get(instance_id)
        return load if asked_for is None else with_foreign(load, Foreign(*asked_for))

    def with_foreign(self, instance_id: str, load: InstanceLoad) -> InstanceLoad:
        """A load as the ledger knows it, raised by what the engine reports beyond that."""
        foreign = self.reported.foreign.get(instance_id)
        return load if foreign is None else with_foreign(load, foreign)

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
            inbound = self._roster.members[name].inbound_flows
            leaving = self._roster.source_flows.get(instance.store, 0)
        size = instance.block_size_tokens
        return InstanceView(instance, load, held * size, fetchable * size, on_ssd * size, inbound, leaving)
