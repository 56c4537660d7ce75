"""The Conductor: what is known in, a decision out. No I/O, no clock, no chance of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from math import inf
from typing import TypeAlias

from msgspec.structs import replace

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import Limits, RefusalReason, Reservation, SeatLimits
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.cost import Computed, CostFitting, CostModels, TransferFitting
from mooncake_scheduler.conductor.fairness import LEAST_BESIDE_WANTING, FairShare, priority_share
from mooncake_scheduler.conductor.holding import Held, Line, seat_limits
from mooncake_scheduler.conductor.margin import TtftMargins
from mooncake_scheduler.conductor.model import (
    Ask,
    Chance,
    Placement,
    Policy,
    Refused,
    Slo,
    Stage,
    World,
)
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.output import OutputPrediction
from mooncake_scheduler.conductor.rebinding import PrefillAt, Rebinding
from mooncake_scheduler.conductor.waiting import PlaceWaits

_Propose: TypeAlias = Callable[[Ask, World, Chance], Iterator[Placement]]


class Conductor:
    """Places requests by a policy, admits them by a rule, and learns from what is observed.

    One object serves one model. It is driven alike by the live scheduler and by a simulator: the caller
    gathers a `World`, asks `decide`, carries the answer out, and reports what happened through `observe_*`.
    The same inputs in the same order with the same chance give the same answers.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        costs: CostModels,
        chance: Chance,
        *,
        priority_floor: int = 0,
        weights: Mapping[str, float] | None = None,
        default_output_tokens: int = 256,
        ttft_percentile: int = 90,
    ) -> None:
        """Puts the parts together.

        Args:
            policy: Chooses the pair (`policies.create`).
            admission: Decides whether the pair may be used.
            costs: The cost models; put them into every `World`. Observations refine them in place.
            chance: Breaks ties (`random.Random(seed)`).
            priority_floor: Requests of a lower priority are refused first.
            weights: What each tenant is entitled to, relative to the others; 1 where none is given.
            default_output_tokens: Answer length that is assumed before anything was learned.
            ttft_percentile: Of admitted requests that are to meet their TTFT target.
        """
        self.policy = policy
        self.order: QueueOrder | None = getattr(policy, "order", None)
        """In which prefills take turns at an instance; None = as they came."""
        self.rebinding: Rebinding | None = None
        """Whether one that waits for its turn had better take it elsewhere; None = it stays where it is."""
        prefill_at: PrefillAt | None = getattr(policy, "prefill_at", None)
        if self.order is not None and prefill_at is not None:
            self.rebinding = Rebinding(prefill_at, self.order)
        self.admission = replace(admission, order=self.order)
        self.costs = costs
        self.fair_share = FairShare(weights)
        self.output = OutputPrediction(default_output_tokens)
        self._fitting = CostFitting(costs)
        self._transfers = TransferFitting(costs)
        self._margins = TtftMargins(costs, ttft_percentile)
        self.waits = PlaceWaits()
        """How those fared lately who waited for a place to decode."""
        self._priority_floor = priority_floor
        self._chance = chance
        self._propose: _Propose | None = getattr(policy, "propose", None)

    def decide(self, ask: Ask, world: World) -> Placement | Refused:
        """Where the request goes, or why it is refused.

        Raises:
            NoInstanceError: nothing can serve it now.
        """
        first: Refused | None = None
        propose = self._propose
        proposals: Iterable[Placement] = (
            (self.policy.place(ask, world, self._chance),)
            if propose is None
            else propose(ask, world, self._chance)
        )
        for placement in proposals:
            refused = self._judge(ask, placement, world)
            if refused is None:
                promised = self.admission.promised(ask, placement, world)
                wait_s = self.admission.wait_s(ask, promised, world, self.waits)
                return promised if wait_s == 0 else replace(promised, wait_s=wait_s)
            first = first or refused
        assert first is not None, "a policy proposes at least one placement"
        return first

    def _judge(self, ask: Ask, placement: Placement, world: World) -> Refused | None:
        """Admission; near the limit, tenants with more than their share give way to the others."""
        floor = self._priority_floor
        share = 1.0 if ask.priority >= floor else priority_share(ask.priority, floor)
        judge, waits = self.admission.judge, self.waits
        # Nobody is kept from this much, so that tenants are weighed against each other only near the limit.
        if judge(ask, placement, world, share * LEAST_BESIDE_WANTING, waits) is None:
            return None
        refused = judge(ask, placement, world, share, waits)
        if refused is not None:
            return refused
        part = self.fair_share.part(ask.tenant, world.now_s)
        if part == 1.0:
            return None
        refused = judge(ask, placement, world, share * part, waits)
        return None if refused is None else replace(refused, reason=RefusalReason.TENANT_QUOTA)

    def explain(self, ask: Ask, world: World, placement: Placement) -> Placement:
        """A placement made in this world, with every candidate as it was seen; nothing is changed by asking.

        Candidates do not depend on chance; the choice among them does, and stays as it was.

        Raises:
            NoInstanceError: the placement was not made in this world.
        """
        # A policy may count its calls (round robin): a copy of it is asked.
        seen = copy(self.policy).place(ask, replace(world, explain=True), _First())
        return replace(placement, considered=seen.considered, considered_decode=seen.considered_decode)

    @property
    def checks_stages(self) -> bool:
        """Whether each stage has to be checked when it starts, because nothing is refused at arrival."""
        return self.admission.mode is AdmissionMode.NONE

    @property
    def holds(self) -> bool:
        """Whether a prefilled request waits for its place to decode (`hold`)."""
        return self.admission.holding

    def line(self) -> Line:
        """A line for those who wait for a place to decode."""
        return Line(self.seat_limits)

    def hold(self, ask: Ask, placement: Placement, slo: Slo, arrived_s: float, now_s: float) -> Held:
        """A request whose prompt was computed just now, as it gets in line.

        Args:
            ask: the request.
            placement: where it was prefilled, and where it was to decode.
            slo: its targets.
            arrived_s: when it came.
            now_s: the moment.
        """
        prefill = placement.prefill or placement.decode
        until_s = now_s + self.admission.longest_hold_s
        if slo.ttft_s is not None:
            # The hand-over comes after the wait.
            transfer_s = self.costs.of(prefill).transfer_s(ask.prompt_tokens)
            until_s = min(until_s, arrived_s + slo.ttft_s - transfer_s)
        return Held(ask, prefill, placement.decode.id, slo, arrived_s, now_s, until_s)

    def seat_limits(self, slo: Slo, decode: Instance) -> SeatLimits:
        """The bounds with which `Ledger.seat` checks a place again."""
        # Of answers under way one half is still to come, on average.
        to_come_tokens = self.output.mean_tokens / 2
        return seat_limits(decode, self.costs.of(decode), slo, self.admission.headroom, to_come_tokens)

    def check_stage(self, stage: Stage, ask: Ask, placement: Placement, world: World) -> Refused | None:
        """Whether a stage may start now (`Admission.check_stage`); a refusal of decode wastes its prefill."""
        return self.admission.check_stage(stage, ask, placement, world)

    def lost(self, reason: RefusalReason, ask: Ask, placement: Placement, world: World) -> Refused:
        """The refusal where a bound of `limits` did not hold any more (`Admission.lost`)."""
        return self.admission.lost(reason, ask, placement, world)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """What each tenant is entitled to has changed; what they were given is remembered."""
        self.fair_share.set_weights(weights)

    def limits(self, ask: Ask, placement: Placement, world: World) -> Limits:
        """The bounds with which `Ledger.reserve` checks the placement again, over all schedulers."""
        return self.admission.limits(ask, placement, world)

    def reservation(
        self, ask: Ask, placement: Placement, now_s: float, *, waits_above_s: float = inf
    ) -> Reservation:
        """What the placement is predicted to take, for the ledger.

        Args:
            ask: The request.
            placement: What was decided.
            now_s: The moment.
            waits_above_s: Its prefill waits for its turn where more than that is queued.
        """
        prefill_end_s = now_s + placement.ttft_s
        drain_s = self.costs.of(placement.prefill or placement.decode).drain_s(
            ask.prompt_tokens, placement.prefix_tokens
        )
        return Reservation(
            id=ask.id,
            prefill=None if placement.prefill is None else placement.prefill.id,
            prefill_cost_s=placement.prefill_s - drain_s,
            decode=placement.decode.id,
            kv_tokens=ask.prompt_tokens + ask.output_tokens,
            prefill_end_s=prefill_end_s,
            decode_end_s=prefill_end_s + ask.output_tokens * placement.tbt_s,
            tenant=ask.tenant,
            prefill_tokens=ask.prompt_tokens - placement.prefix_tokens,
            waits_above_s=waits_above_s,
            # What is fetched comes after its turn has.
            latest_end_s=now_s + placement.promised_ttft_s - placement.transfer_s - drain_s,
        )

    def expected_output_tokens(self, tenant: str, prompt_tokens: int, max_tokens: int | None = None) -> int:
        """What to put into `Ask.output_tokens`: learned, and never above the client's `max_tokens`."""
        return self.output.predict(tenant, prompt_tokens, max_tokens)

    def observe_admitted(self, ask: Ask, now_s: float) -> None:
        """A request was reserved: its tokens count towards its tenant's share."""
        self.fair_share.charge(ask.tenant, ask.prompt_tokens + ask.output_tokens, now_s)

    def observe_refused(self, ask: Ask, now_s: float) -> None:
        """A request was refused: its tenant wants more than it gets."""
        self.fair_share.refuse(ask.tenant, now_s)

    def observe_prefill(self, instance_class: str, computed: Computed) -> None:
        """Prompts took so long to compute, in seconds of the shared clock; waiting and transfer left out.

        Args:
            instance_class: `conductor.cost.class_of(instance)`.
            computed: What was computed (`PrefillPace` tells).
        """
        seconds = computed.seconds
        model = self.costs.of_class(instance_class)
        if computed.alone and model.stages > 1:
            # n - p and n² - p² tell n and p of one prompt.
            tokens = (computed.squares // computed.tokens + computed.tokens) // 2
            seconds -= model.drain_s(tokens, tokens - computed.tokens)
        self._fitting.observe_computed(instance_class, computed.tokens, computed.squares, seconds)

    def observe_fetch(
        self, instance_class: str, tokens: int, cached: int, fetched: int, seconds: float
    ) -> None:
        """A prefix of `fetched` tokens came from elsewhere and the rest was computed, in `seconds`."""
        model = self.costs.of_class(instance_class)
        if model.knows_prefill:
            self._transfers.observe_fetch(instance_class, fetched, seconds - model.prefill_s(tokens, cached))

    def observe_hand_over(self, instance_class: str, tokens: int, seconds: float) -> None:
        """From the end of a prefill of `tokens` on this class to decode's first token it took `seconds`."""
        self._transfers.observe_hand_over(instance_class, tokens, seconds)

    def observe_ttft(
        self, instance_class: str, predicted_s: float, seconds: float, target_s: float | None
    ) -> None:
        """An admitted request's first token came after so long; `predicted_s` as when it was admitted."""
        if target_s is not None:
            self._margins.observe(instance_class, predicted_s, seconds, target_s)

    def observe_place(self, held: Held, now_s: float, *, found: bool) -> None:
        """A prefilled request has got its place to decode, or was given up (not: its client left)."""
        need_tokens = held.ask.prompt_tokens + held.ask.output_tokens
        self.waits.observe(need_tokens, now_s - held.since_s, now_s, found=found)

    def observe_step(self, instance_class: str, batch: float, kv_tokens: float, seconds: float) -> None:
        """A decode step (the time between two tokens) took so long with this batch and its KV tokens.

        Both are means over the steps that were measured, and only of requests that were decoding.
        """
        self._fitting.observe_step(instance_class, batch, kv_tokens, seconds)

    def observe_output(
        self, tenant: str, prompt_tokens: int, output_tokens: int, *, max_tokens: int | None = None
    ) -> None:
        """An answer came to its own end with so many tokens."""
        self.output.observe(tenant, prompt_tokens, output_tokens, max_tokens=max_tokens)


class _First:
    """Chance that always takes the first."""

    def random(self) -> float:
        return 0.0
