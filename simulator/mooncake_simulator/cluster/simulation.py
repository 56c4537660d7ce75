"""A trace on a simulated cluster, placed and admitted by the Conductor that serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from msgspec.structs import replace

from mooncake_core.ledger import InstanceLoad
from mooncake_core.ledger.board import Board
from mooncake_core.profiles import Profile
from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
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
from mooncake_scheduler.conductor.prediction import without_arriving
from mooncake_scheduler.policies import create
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.batch import Batch
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.coupled import Chunked, PrefillFirst
from mooncake_simulator.cluster.failures import NO_INSTANCE, Present, schedule
from mooncake_simulator.cluster.holding import Holding
from mooncake_simulator.cluster.life import Life
from mooncake_simulator.cluster.links import Link
from mooncake_simulator.cluster.outcome import Outcome, Result
from mooncake_simulator.cluster.prefill import PrefillQueue
from mooncake_simulator.cluster.prefixes import Prefix, Prefixes
from mooncake_simulator.cluster.rebinding import LateBinding
from mooncake_simulator.cluster.replicas import ReplicaWatch
from mooncake_simulator.cluster.reports import LateLoads
from mooncake_simulator.cluster.residency import Residency
from mooncake_simulator.cluster.series import Load, Series
from mooncake_simulator.cluster.tiers import TieredStore, Turn
from mooncake_simulator.cluster.turns import OrderedQueue
from mooncake_simulator.workloads.traces import BLOCK_TOKENS, Request

_IDLE = InstanceLoad()


def simulate(
    spec: ClusterSpec,
    requests: Sequence[Request],
    *,
    speed: float = 1.0,
    seed: int = 0,
    on_arrival: Callable[[], None] | None = None,
) -> Result:
    """Run a trace through a cluster.

    The same arguments give the same result to the last bit.

    Args:
        spec: the cluster.
        requests: the trace, by arrival.
        speed: trace seconds that pass a second.
        seed: of the chance that breaks ties.
        on_arrival: called when a request arrives, for those who show how far it is.

    Returns:
        What became of each request, in the order of the trace.

    Raises:
        ValueError: a speed that no time passes at.
    """
    if not 0 < speed < inf:
        raise ValueError(f"speed is trace seconds a second, a number above 0, not {speed}")
    return Simulation(spec, random.Random(seed), on_arrival).run(requests, speed)


class Simulation:
    """A cluster with all that happens in it; arguments as for `simulate`."""

    def __init__(
        self, spec: ClusterSpec, chance: random.Random, on_arrival: Callable[[], None] | None
    ) -> None:
        self.spec = spec
        self._on_arrival = on_arrival
        self.agenda = Agenda()
        profiles = spec.prefill_kinds + spec.decode_kinds
        self.models = {each.name: CostModel.from_profile(each) for each in profiles}
        self.kv_bytes_per_token = spec.profile.kv_bytes_per_token
        self.slo = Slo(spec.ttft_target_s, spec.tbt_target_s)
        self.costs = CostModels(self.models)
        settings = {"balancing_threshold": spec.balancing_threshold, "shortest_first": spec.shortest_first}
        self.conductor = Conductor(
            create(spec.policy, **settings), Admission(spec.admission, holding=spec.holds), self.costs, chance
        )
        self.board = Board()
        first = Role.BOTH if spec.coupled else Role.PREFILL
        self.prefill = [_instance(spec, first, *each) for each in enumerate(spec.prefill_kinds)]
        self.decode = [_instance(spec, Role.DECODE, *each) for each in enumerate(spec.decode_kinds)]
        if spec.coupled:
            self.decode = self.prefill
        self.numbers = {each.id: at for row in (self.prefill, self.decode) for at, each in enumerate(row)}
        self.prefill_busy, self.decode_busy, self.kv_tokens = Series(), Series(), Series()
        self.order = None if spec.coupled else self.conductor.order
        rebinding = self.conductor.rebinding
        # Without a ledger that knows the present, nobody could tell where there is room.
        moves = rebinding is not None and not spec.coupled and not spec.load_age_s
        self.late_binding = LateBinding(self, rebinding) if moves and rebinding is not None else None
        self.queues = [self._queue(number) for number in range(len(self.prefill))]
        self.senders = [Link(each.network_bytes_per_s) for each in spec.prefill_kinds]
        self.receivers = [Link(each.network_bytes_per_s) for each in spec.prefill_kinds]
        kinds = spec.prefill_kinds if spec.coupled else spec.decode_kinds
        self.batches = [self._batch(each) for each in kinds]
        self.present_prefill, self.present_decode = Present(self.prefill), Present(self.decode)
        self.holding = Holding(self.agenda, self.conductor, self.board, self.present_decode.now)
        caches = spec.cache_blocks
        # The store is one more holder, behind the instances.
        self.residency = Residency([*caches, spec.store_blocks] if spec.fetch == "store" else caches)
        self.tiers = None if spec.tiers is None else TieredStore(self.agenda, spec.tiers, spec.profile)
        self.prefixes = Prefixes(spec, self.residency, self.senders, self.tiers)
        self.late = LateLoads(self.agenda, self.board, spec.load_age_s) if spec.load_age_s else None
        self.outcomes: list[Outcome] = []
        self.lives: dict[str, Life] = {}
        """Requests under way, by name."""

    def _queue(self, number: int) -> PrefillQueue | OrderedQueue:
        if self.order is None:
            return PrefillQueue(self.agenda, self.prefill_busy)
        if self.late_binding is None:
            return OrderedQueue(self.agenda, self.order, self.prefill_busy)
        look = partial(self.late_binding.look, number)
        return OrderedQueue(self.agenda, self.order, self.prefill_busy, look)

    def _batch(self, profile: Profile) -> Batch:
        batch = self._batch_of_kind(profile)
        batch.busy, batch.kv_tokens = self.decode_busy, self.kv_tokens
        return batch

    def _batch_of_kind(self, profile: Profile) -> Batch:
        spec, capacity_tokens, model = self.spec, profile.kv_capacity_tokens, self.models[profile.name]
        if spec.coupled == "prefill-first":
            return PrefillFirst(self.agenda, model, capacity_tokens)
        if spec.coupled == "chunked":
            return Chunked(self.agenda, model, capacity_tokens, spec.chunk_tokens)
        return Batch(self.agenda, model, capacity_tokens, spec.join_load_bytes_per_s, spec.max_batch)

    def _load(self) -> Load:
        """Of both stages, while there were arrivals."""
        until_s = max([outcome.arrival_s for outcome in self.outcomes], default=0.0)
        decode, memory = len(self.batches), sum([each.kv_capacity_tokens for each in self.decode])
        return Load(
            self.prefill_busy.window_s,
            self.prefill_busy.means(until_s, len(self.queues)),
            self.decode_busy.means(until_s, decode),
            self.kv_tokens.means(until_s, memory),
        )

    def run(self, requests: Sequence[Request], speed: float) -> Result:
        # A trace may be the middle of another, or count from 1970.
        first_ms = min([request.timestamp_ms for request in requests], default=0)
        for number, request in enumerate(requests):
            arrival_s = (request.timestamp_ms - first_ms) / 1e3 / speed
            outcome = Outcome(arrival_s, request.input_length, request.output_length)
            self.outcomes.append(outcome)
            self.agenda.at(arrival_s, self._arrive, str(number), request, outcome)
        if self.late is not None:
            self.late.look_at([outcome.arrival_s for outcome in self.outcomes])
        last_s = max([outcome.arrival_s for outcome in self.outcomes], default=0.0)
        if self.tiers is not None and self.outcomes:
            self.tiers.look_ahead_until(last_s)
        schedule(self.agenda, self.spec.failures, dies=self._dies, returns=self._returns)
        watch = ReplicaWatch(self.agenda, self.residency, self.spec.prefill, requests, last_s)
        self.agenda.run()
        return Result(
            self.outcomes,
            self.spec.ttft_target_s,
            self.spec.tbt_target_s,
            max([outcome.last_s for outcome in self.outcomes], default=0.0),
            [queue.busy_s for queue in self.queues],
            [batch.busy_s for batch in self.batches],
            max([batch.most_tokens for batch in self.batches], default=0),
            sum([batch.put_off for batch in self.batches]),
            self._load(),
            None if self.tiers is None else self.tiers.used(),
            watch.seen,
        )

    def _arrive(self, name: str, request: Request, outcome: Outcome) -> None:
        if self._on_arrival is not None:
            self._on_arrival()
        conductor, now_s = self.conductor, self.agenda.now_s
        expected = conductor.expected_output_tokens("default", request.input_length)
        ask = Ask(name, request.input_length, expected)
        loads = self.board.loads(now_s) if self.late is None else self.late.next()
        world, prefix = self._world(request, loads)
        try:
            decision = conductor.decide(ask, world)
        except NoInstanceError:
            outcome.refused = NO_INSTANCE
            return
        if isinstance(decision, Placement) and conductor.checks_stages:
            decision = conductor.check_stage(Stage.PREFILL, ask, decision, world) or decision
        if isinstance(decision, Refused):
            outcome.refused = decision.reason.value
            return
        reservation = conductor.reservation(ask, decision, now_s)
        limits = conductor.limits(ask, decision, world)
        lost = None if self.late is not None else self.board.exceeded(reservation, limits, now_s)
        if lost is not None:
            outcome.refused = lost.value
            return
        self.board.book.add(reservation, now_s, waits=self.order is not None)
        conductor.observe_admitted(ask, now_s)
        if decision.promised_ttft_s < inf:
            outcome.promised_ttft_s = decision.promised_ttft_s
        outcome.predicted_ttft_s = decision.ttft_s + decision.wait_s
        outcome.predicted_tbt_s = decision.tbt_s
        outcome.predicted_output_tokens = ask.output_tokens
        life = self.lives[name] = Life(self, request, outcome, ask, decision)
        if self.spec.coupled:
            life.serve_whole()
        else:
            life.dispatch(prefix)

    def _dies(self, name: str) -> None:
        """An instance loses all it has. What it was doing goes on unseen: nobody listens to it any more."""
        number = self.numbers[name]
        if name in {each.id for each in self.prefill}:
            self.present_prefill.change(name, there=False)
            self.residency.clear(number)
            queue, self.queues[number] = self.queues[number], self._queue(number)
            queue.die()
            self.queues[number].busy_s = queue.busy_s
            lost = [life for life in self.lives.values() if life.prefill == number and not life.decoding]
        else:
            self.present_decode.change(name, there=False)
            batch = self.batches[number]
            batch.busy, batch.kv_tokens = Series(), Series()
            self.batches[number] = self._batch(self.spec.decode_kinds[number])
            self.batches[number].carry_on(batch)
            lost = [
                life for life in self.lives.values() if life.decoding and life.placement.decode.id == name
            ]
        for life in lost:
            life.lose()
        self.holding.look()

    def _returns(self, name: str) -> None:
        for present in (self.present_prefill, self.present_decode):
            present.change(name, there=True)
        if self.late_binding is not None and name in {each.id for each in self.prefill}:
            self.late_binding.look(self.numbers[name])
        self.holding.look()

    def again(self, life: Life) -> None:
        """Place a request anew that was admitted before: it is not refused for its load any more."""
        now_s, outcome = self.agenda.now_s, life.outcome
        outcome.placed_again += 1
        name = f"{life.ask.id.partition('~')[0]}~{outcome.placed_again}"
        ask = replace(life.ask, id=name)
        world, prefix = self._world(life.request, self.board.loads(now_s))
        placement: Placement | None = None
        reason = NO_INSTANCE
        with suppress(NoInstanceError):
            decision = self.conductor.decide(ask, world)
            if isinstance(decision, Refused):
                placement, reason = decision.placement, decision.reason.value
            else:
                placement = decision
        if placement is None:
            outcome.refused = reason
            if self.tiers is not None and life.turn is not None:
                self.tiers.given_up(life.turn)
            return
        reservation = self.conductor.reservation(ask, placement, now_s)
        self.board.book.add(reservation, now_s, waits=self.order is not None)
        anew = self.lives[name] = Life(self, life.request, outcome, ask, placement)
        anew.turn = life.turn
        anew.dispatch(prefix)

    def _world(self, request: Request, loads: Mapping[str, InstanceLoad]) -> tuple[World, Prefix]:
        """What is known at an arrival, and of the prompt's prefix."""
        now_s, present = self.agenda.now_s, self.present_prefill
        prefix = self.prefixes.of(request.hash_ids, now_s)
        prefill = [
            prefix.view(number, instance, loads.get(instance.id, _IDLE), self.receivers[number].flows(now_s))
            for number, instance in enumerate(self.prefill)
            if instance.id in present
        ]
        if self.spec.coupled:
            return World(now_s, prefill, prefill, self.costs, self.slo), prefix
        decode = [
            InstanceView(instance, loads.get(instance.id, _IDLE)) for instance in self.present_decode.now
        ]
        return World(now_s, prefill, decode, self.costs, self.slo), prefix

    def look_at(self, request: Request, number: int) -> tuple[InstanceView, Prefix]:
        """One prefill instance as a request finds it now."""
        now_s, instance = self.agenda.now_s, self.prefill[number]
        prefix = self.prefixes.of(request.hash_ids, now_s)
        load = self.board.load(instance.id, now_s)
        return prefix.view(number, instance, load, self.receivers[number].flows(now_s)), prefix

    def store(self, instance: int, blocks: Sequence[int], turn: Turn | None) -> None:
        """An instance has written a prompt's KV to the shared store."""
        holder, residency = self.spec.prefill, self.residency
        if self.tiers is not None and turn is not None:
            blocks = turn.blocks
            self.tiers.stored(turn, instance)
        dropped = residency.promise(holder, blocks)
        residency.arrive(holder, blocks)
        if self.tiers is not None and dropped:
            self.tiers.dropped(dropped)

    def scene(self, placement: Placement, ask: Ask) -> World:
        """A placement's decode instance as it is now, without the request itself."""
        now_s = self.agenda.now_s
        entry = self.board.book.get(ask.id)
        assert entry is not None
        load = without_arriving(self.board.load(placement.decode.id, now_s), entry.reservation)
        return World(now_s, (), [InstanceView(placement.decode, load)], self.costs, self.slo)


def _instance(spec: ClusterSpec, role: Role, number: int, profile: Profile) -> Instance:
    return Instance(
        id=f"{role.value[0]}-{number}",
        role=role,
        url="",
        engine=EngineKind.SIMULATED,
        connector="MooncakeConnector",
        block_size_tokens=BLOCK_TOKENS,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        max_batch=spec.max_batch,
        fetch=spec.fetch if role is Role.PREFILL else "none",
        instance_class=profile.name,
        pipeline_stages=profile.prefill_stages,
    )
