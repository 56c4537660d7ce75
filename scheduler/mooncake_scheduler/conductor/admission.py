"""Admission: whether a placement is allowed, by the load it is predicted to meet (arXiv 2407.00079 §7).

Load is SLO satisfaction: predicted TTFT / target for prefill, predicted TBT / target for decode, and the KV
memory promised / what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import floor, inf

import msgspec
from msgspec.structs import replace

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, Limits, RefusalReason, Waiting
from mooncake_core.ledger.contract import BUCKET_S
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import Ask, InstanceView, Placement, Refused, Stage, World
from mooncake_scheduler.conductor.order import ROUNDING_S, QueueOrder
from mooncake_scheduler.conductor.prediction import DecodeLoad, decode_at, decode_course, decode_now
from mooncake_scheduler.conductor.waiting import LEAST_CHANCE, PlaceWaits

_NOBODY_WAITED = PlaceWaits()


class Admission(msgspec.Struct, frozen=True):
    """The rules: when to look (mode), and how much to leave free for growth (headroom)."""

    mode: AdmissionMode = AdmissionMode.PREDICTIVE
    headroom: float = 0.95
    """Share of the TBT target and of HBM that is filled; the rest is room for KV growth."""
    order: QueueOrder | None = None
    """In which prefills take turns at an instance; None = as they came."""
    holding: bool = False
    """Whether prefilled requests wait for a place to decode (`conductor.holding`)."""
    longest_hold_s: float = 60.0
    """Most that it waits, also where the TTFT target leaves more: staged KV is not kept without end."""

    def judge(
        self,
        ask: Ask,
        placement: Placement,
        world: World,
        share: float = 1.0,
        waits: PlaceWaits = _NOBODY_WAITED,
    ) -> Refused | None:
        """None when the placement is admitted, else why not and when to come back.

        Never refuses where the instance is idle, nor on a prediction whose cost model is cold.

        Args:
            ask: The request.
            placement: What a policy chose for it.
            world: What was known when it chose.
            share: Part of the limits that this request may fill; under 1 for those refused first.
            waits: How those fared lately who waited for a place to decode.
        """
        if self.mode is AdmissionMode.NONE:
            return None
        scene = Scene(ask, placement, world, self)
        refused = scene.prefill_refusal(share)
        if refused is not None:
            return refused
        # A promise that brings it forward brings it to decode earlier too.
        scene = scene.as_promised()
        if self._waits_for_a_place(placement):
            return scene.wait_refusal(share, waits)
        return scene.decode_refusal(share)

    def wait_s(self, ask: Ask, placement: Placement, world: World, waits: PlaceWaits) -> float:
        """Seconds that a request is predicted to wait for a place to decode once its prompt is computed."""
        if not self._waits_for_a_place(placement):
            return 0.0
        if Scene(ask, placement, world, self).has_to_wait(1.0) is None:
            return 0.0
        return waits.expected_s(ask.prompt_tokens + ask.output_tokens, world.now_s)

    def _waits_for_a_place(self, placement: Placement) -> bool:
        """Whether KV is staged: an engine that does it all has nowhere to keep a request waiting."""
        return self.holding and self.mode is AdmissionMode.PREDICTIVE and placement.prefill is not None

    def promised(self, ask: Ask, placement: Placement, world: World) -> Placement:
        """A placement that is admitted, with the TTFT that is promised for it and kept by the order of turns.

        None is promised without a target, nor where the target cannot be met (an instance that is idle is
        not refused). One that would be in time only with a promise is predicted to come as that allows.
        """
        if self.order is None or placement.prefill is None or world.slo.ttft_s is None:
            return placement
        return Scene(ask, placement, world, self).as_promised().promised()

    def check_stage(self, stage: Stage, ask: Ask, placement: Placement, world: World) -> Refused | None:
        """None when a stage may start now, else why not; the mode does not matter.

        Prefill looks at the TTFT predicted at its start, decode at the time between tokens and the KV memory
        with what decodes beside it (arXiv 2407.00079 §7.3's baseline). As in `judge`, neither refuses where
        the instance is idle, nor on a prediction whose cost model is cold.

        Args:
            stage: Which one is about to start.
            ask: The request.
            placement: Where it runs.
            world: What is known now, the request itself left out; decode looks at its own instance alone.
        """
        scene = Scene(ask, placement, world, self)
        return scene.prefill_refusal(1.0) if stage is Stage.PREFILL else scene.decode_start_refusal()

    def lost(self, reason: RefusalReason, ask: Ask, placement: Placement, world: World) -> Refused:
        """The refusal of a request whose place others took between the decision and the reservation.

        Args:
            reason: The bound that did not hold any more.
            ask: The request.
            placement: What was decided.
            world: What is known after it: Retry-After is when the load in it has fallen far enough.
        """
        return Scene(ask, placement, world, self).lost(reason)

    def limits(self, ask: Ask, placement: Placement, world: World) -> Limits:
        """What `Ledger.reserve` checks again, so that schedulers deciding at once cannot overrun the targets.

        The ledger compares what is promised now; what will have left by the time of arrival is added to the
        bounds. An idle instance is given room for this request whatever its size.
        """
        if self.mode is AdmissionMode.NONE:
            return Limits()
        if self._waits_for_a_place(placement):
            # The place is taken when the prompt is computed, by `Ledger.seat`.
            return Limits(Scene(ask, placement, world, self).queue_limit_s())
        return Scene(ask, placement, world, self).limits()


class Scene:
    """One placement before the judge: the two instances with their load, cost models and targets."""

    __slots__ = (
        "_ask", "_by_rank", "_headroom", "_instance", "_load", "_model", "_need_tokens", "_order",
        "_placement", "_rules", "_world",
    )  # fmt: skip

    def __init__(self, ask: Ask, placement: Placement, world: World, rules: Admission) -> None:
        self._ask = ask
        self._placement = placement
        self._by_rank = placement
        """The same with no promise: another one only where a promise brings it forward."""
        self._world = world
        self._rules = rules
        self._headroom = rules.headroom
        # Who prefills where it decodes does not wait for a turn.
        self._order = None if placement.prefill is None else rules.order
        self._need_tokens = ask.prompt_tokens + ask.output_tokens
        self._instance = placement.decode
        self._model: CostModel = world.cost.of(placement.decode)
        self._load = view_of(placement.decode, world.decode, world.prefill).load

    def limits(self) -> Limits:
        """The bounds of the reservation."""
        load = self._seen_load()
        return Limits(self.queue_limit_s(), self._batch_limit(load), self._kv_limit_tokens(load))

    # Prefill

    def prefill_refusal(self, share: float) -> Refused | None:
        """A refusal for a TTFT beyond its limit; Retry-After is when enough of the queue has drained."""
        limit_s = self.ttft_limit_s()
        ttft_s = self._placement.ttft_s
        if limit_s is not None and ttft_s > share * limit_s:
            ttft_s = min(ttft_s, self._earliest_ttft_s())
        if limit_s is None or ttft_s <= share * limit_s or not self._knows_prefill() or self._prefill_idle():
            return None
        # The queue drains a second a second; the rest of the TTFT does not wait.
        wait_s = min(ttft_s - share * limit_s, self._placement.queue_s)
        return self._refused(RefusalReason.TTFT, wait_s, self._placement.tbt_s)

    def as_promised(self) -> Scene:
        """The same with the request brought forward, where it is in time only with a promise; else itself."""
        placement, limit_s, order = self._placement, self.ttft_limit_s(), self._order
        if order is None or limit_s is None or placement.ttft_s <= limit_s:
            return self
        if not self._knows_prefill() or self._earliest_ttft_s() > limit_s:
            return self
        now_s = self._world.now_s
        newcomer = self._newcomer(now_s + limit_s - placement.transfer_s)
        queue_s = order.join(self._prefill_load(), newcomer, now_s).queue_s
        ttft_s = placement.transfer_s + queue_s + placement.prefill_s
        arrival = decode_at(self._load, now_s, now_s + ttft_s)
        brought_forward = replace(
            placement, queue_s=queue_s, ttft_s=ttft_s, tbt_s=self._tbt_s(arrival), arrival=arrival
        )
        scene = Scene(self._ask, brought_forward, self._world, self._rules)
        scene._by_rank = placement
        return scene

    def promised(self) -> Placement:
        """The placement with its limit as a promise, where that can be kept."""
        placement, limit_s = self._placement, self.ttft_limit_s()
        if limit_s is None or self._order is None or not self._knows_prefill() or placement.ttft_s > limit_s:
            return placement
        return replace(placement, promised_ttft_s=limit_s)

    def _earliest_ttft_s(self) -> float:
        """The least TTFT that it can have with all promises kept; without an order there is only the one."""
        placement, order, now_s = self._placement, self._order, self._world.now_s
        if order is None:
            return placement.ttft_s
        drain_s = self._drain_s()
        end_s = order.earliest_end_s(self._prefill_load(), placement.prefill_s - drain_s, now_s)
        return placement.transfer_s + end_s + drain_s - now_s

    def _newcomer(self, latest_end_s: float) -> Waiting:
        drain_s = self._drain_s()
        cost_us = int((self._placement.prefill_s - drain_s) * 1e6)
        return Waiting(self._world.now_s, cost_us, latest_end_s - drain_s)

    def _drain_s(self) -> float:
        """Of the prefill, what later stages take while the next one already runs: nobody queues for that."""
        return self._prefill_model().drain_s(self._ask.prompt_tokens, self._placement.prefix_tokens)

    def queue_limit_s(self) -> float:
        """`Limits.queued_s`: what the TTFT's limit leaves after the transfer.

        Where turns are taken in an order, it is what is queued and as much more as breaks no promise.
        """
        placement, order = self._placement, self._order
        if order is not None:
            load, now_s = self._prefill_load(), self._world.now_s
            newcomer = self._newcomer(now_s + placement.promised_ttft_s - placement.transfer_s)
            more_s = order.slack_s(load, newcomer, now_s) + ROUNDING_S
            return load.queued_s + placement.prefill_s - self._drain_s() + more_s
        ttft_limit_s = self.ttft_limit_s()
        if ttft_limit_s is None or not self._knows_prefill():
            return inf
        drain_s = self._drain_s()
        occupied_s = placement.prefill_s - drain_s
        limit_s = ttft_limit_s - placement.transfer_s - drain_s
        return occupied_s if limit_s < occupied_s and self._prefill_idle() else limit_s

    def ttft_limit_s(self) -> float | None:
        """The predicted TTFT with which the target is still met as often as promised.

        The other modes are the paper's, which take predictions at their word.
        """
        target_s = self._world.slo.ttft_s
        if target_s is None or self._rules.mode is not AdmissionMode.PREDICTIVE:
            return target_s
        return target_s / self._prefill_model().ttft_margin

    def _prefill_model(self) -> CostModel:
        return self._world.cost.of(self._placement.prefill or self._instance)

    def _knows_prefill(self) -> bool:
        return self._prefill_model().knows_prefill

    def _prefill_idle(self) -> bool:
        load = self._prefill_load()
        return load.queued == 0 and load.queued_s <= 0

    def _prefill_load(self) -> InstanceLoad:
        prefill = self._placement.prefill
        return self._load if prefill is None else view_of(prefill, self._world.prefill).load

    def lost(self, reason: RefusalReason) -> Refused:
        """A refusal for a bound that a reservation met."""
        limit_s = self.ttft_limit_s()
        if reason is RefusalReason.TTFT and limit_s is not None:
            queue_s = self._prefill_load().queued_s
            ttft_s = queue_s + self._placement.transfer_s + self._placement.prefill_s
            wait_s = min(max(0.0, ttft_s - limit_s), queue_s)
        else:
            wait_s = self._decode_wait_s(1.0)
        return self._refused(reason, wait_s, self._placement.tbt_s)

    # Waiting for a place to decode

    def has_to_wait(self, share: float) -> RefusalReason | None:
        """What is predicted to be full when it reaches decode; None where it gets a place at once."""
        return self._reason_at_arrival(share)

    def wait_refusal(self, share: float, waits: PlaceWaits) -> Refused | None:
        """A refusal where decode is full and no place is likely to be free before the first token is due."""
        reason = self.has_to_wait(share)
        if reason is None:
            return None
        limit_s = self.ttft_limit_s()
        within_s = self._rules.longest_hold_s
        if limit_s is not None:
            within_s = min(within_s, max(0.0, share * limit_s - self._by_rank.ttft_s))
        chance = waits.chance(self._need_tokens, within_s, self._world.now_s)
        wait_s = self._decode_wait_s(share)
        if wait_s <= within_s if chance is None else chance >= LEAST_CHANCE:
            return None
        return self._refused(reason, wait_s, self._tbt_s(self._seen_load()))

    # Decode

    def decode_start_refusal(self) -> Refused | None:
        """A refusal of a decode that would start now, by what decodes at this moment."""
        load = decode_now(self._load)
        reason = self._decode_reason(load, load.kv_tokens, 1.0)
        if reason is None:
            return None
        return self._refused(reason, self._decode_wait_s(1.0), self._tbt_s(load))

    def decode_refusal(self, share: float) -> Refused | None:
        """A refusal for decode's TBT or KV memory, as seen by the mode; Retry-After from the buckets."""
        load = self._seen_load()
        reason = self._reason_at_arrival(share, self._held_kv_tokens(load, share))
        if reason is None:
            return None
        return self._refused(reason, self._decode_wait_s(share), self._tbt_s(load))

    def _reason_at_arrival(self, share: float, held_kv_tokens: int | None = None) -> RefusalReason | None:
        """What is full when it arrives; where nothing else is said, memory holds what decodes then."""
        for load in self._loads():
            held = load.kv_tokens if held_kv_tokens is None else held_kv_tokens
            reason = self._decode_reason(load, held, share)
            if reason is not None:
                return reason
        return None

    def _decode_reason(self, load: DecodeLoad, held_kv_tokens: int, share: float) -> RefusalReason | None:
        batch = load.batch
        if batch > 0:
            target_s = self._world.slo.tbt_s
            if 0 < self._instance.max_batch <= batch or (
                target_s is not None
                and self._tbt_s(load) > share * self._headroom * target_s
                and self._model.knows_decode
            ):
                return RefusalReason.TBT
        if held_kv_tokens > 0 and not self._fits(held_kv_tokens, share):
            return RefusalReason.KV_MEMORY
        return None

    def _fits(self, held_kv_tokens: int, share: float) -> bool:
        capacity = self._instance.kv_capacity_tokens
        return not 0 < share * self._headroom * capacity < held_kv_tokens + self._need_tokens

    def _held_kv_tokens(self, load: DecodeLoad, share: float) -> int:
        """KV tokens that memory holds beside this request.

        All that is promised, or, where that does not fit and the mode looks ahead, the most that is held at
        one moment of this request's life: who arrives later may find others gone.
        """
        held = load.promised_kv_tokens
        if self._fits(held, share) or self._rules.mode is not AdmissionMode.PREDICTIVE:
            return held
        now_s = self._world.now_s
        by_rank = self._by_rank
        end_s = now_s + by_rank.ttft_s + self._ask.output_tokens * by_rank.tbt_s
        course = decode_course(self._load, now_s, now_s + self._placement.ttft_s)
        return max(at.kv_tokens for _, at in takewhile(lambda each: each[0] <= end_s, course))

    def _loads(self) -> Sequence[DecodeLoad]:
        """What decode may carry when it arrives there.

        A promise is a latest end: one that is brought forward by it comes at any time until its rank alone
        would have brought it. So a tighter target looks at more, never at less.
        """
        seen, by_rank = self._seen_load(), self._by_rank
        if by_rank is self._placement or self._rules.mode is AdmissionMode.EARLY:
            return (seen,)
        now_s = self._world.now_s
        until_s = now_s + by_rank.ttft_s
        course = decode_course(self._load, now_s, now_s + self._placement.ttft_s)
        between = [load for _, load in takewhile(lambda each: each[0] <= until_s, course)]
        return (*between, decode_at(self._load, now_s, until_s))

    def _seen_load(self) -> DecodeLoad:
        if self._rules.mode is AdmissionMode.EARLY:
            return decode_now(self._load)
        if self._placement.arrival is not None:
            return self._placement.arrival
        now_s = self._world.now_s
        return decode_at(self._load, now_s, now_s + self._placement.ttft_s)

    def _tbt_s(self, load: DecodeLoad) -> float:
        return self._model.step_s(load[0] + 1, load[1] + self._need_tokens)

    def _decode_wait_s(self, share: float) -> float:
        """Seconds until an arrival one TTFT later would find room, as far as the buckets tell."""
        now_s = self._world.now_s
        from_s = now_s + self._by_rank.ttft_s
        at_s = from_s
        for at_s, load in decode_course(self._load, now_s, from_s):  # noqa: B007 - the last counts
            if self._decode_reason(load, load.kv_tokens, share) is None:
                break
        return at_s - from_s

    def _batch_limit(self, load: DecodeLoad) -> int:
        """`Limits.batch`: promised now, and as many more as fit into the predicted load."""
        room = inf
        if self._instance.max_batch:
            room = float(self._instance.max_batch - load.batch)
        target_s = self._world.slo.tbt_s
        if target_s is not None and self._model.knows_decode:
            more_s = self._model.t1_s_per_request + self._model.t2_s_per_token * self._need_tokens
            if more_s > 0:
                room = min(room, 1 + (self._headroom * target_s - self._tbt_s(load)) / more_s)
        if room == inf:
            return 0
        now = self._load
        return max(1, now.batch + now.arriving + max(floor(room), 1 if load.batch == 0 else 0))

    def _kv_limit_tokens(self, load: DecodeLoad) -> int:
        """`Limits.kv_tokens`: promised now, and as many more as fit when the request arrives."""
        capacity = self._instance.kv_capacity_tokens
        if not capacity:
            return 0
        held = self._held_kv_tokens(load, 1.0)
        room = max(0, int(self._headroom * capacity) - held)
        if held == 0:
            room = max(room, self._need_tokens)
        return self._load.kv_tokens + room

    def _refused(self, reason: RefusalReason, wait_s: float, tbt_s: float) -> Refused:
        return Refused(
            reason=reason,
            ttft_s=self._placement.ttft_s,
            tbt_s=tbt_s,
            retry_after_s=max(wait_s, BUCKET_S),
            placement=self._placement,
        )


def view_of(instance: Instance, *lists: Sequence[InstanceView]) -> InstanceView:
    """The view of an instance in the world it was chosen from."""
    for views in lists:
        for view in views:
            if view.instance is instance or view.instance.id == instance.id:
                return view
    raise LookupError(f"{instance.id} is not in the world that it was chosen from")
