"""The rules of admission: who is asked what, and when."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import Limits, RefusalReason
from mooncake_scheduler.conductor.admission.decode import DecodeSide
from mooncake_scheduler.conductor.admission.prefill import PrefillSide
from mooncake_scheduler.conductor.model import Ask, Placement, Refused, Stage, World
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.waiting import PlaceWaits

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
        prefill = self._prefill(ask, placement, world)
        refused = prefill.refusal(share)
        if refused is not None:
            return refused
        # A promise that brings it forward brings it to decode earlier too.
        decode = self._decode(ask, prefill.as_promised(), world, placement)
        if not self._waits_for_a_place(placement):
            return decode.refusal(share)
        within_s, limit_s = self.longest_hold_s, prefill.limit_s()
        if limit_s is not None:
            within_s = min(within_s, max(0.0, share * limit_s - placement.ttft_s))
        return decode.wait_refusal(share, waits, within_s)

    def wait_s(self, ask: Ask, placement: Placement, world: World, waits: PlaceWaits) -> float:
        """Seconds that a request is predicted to wait for a place to decode once its prompt is computed."""
        if not self._waits_for_a_place(placement):
            return 0.0
        if self._decode(ask, placement, world).has_to_wait(1.0) is None:
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
        prefill = self._prefill(ask, placement, world)
        placement = prefill.as_promised()
        return replace(placement, promised_ttft_s=prefill.promise_s(placement.ttft_s))

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
        if stage is Stage.PREFILL:
            return self._prefill(ask, placement, world).refusal(1.0)
        return self._decode(ask, placement, world).refusal_now()

    def lost(self, reason: RefusalReason, ask: Ask, placement: Placement, world: World) -> Refused:
        """The refusal of a request whose place others took between the decision and the reservation.

        Args:
            reason: The bound that did not hold any more.
            ask: The request.
            placement: What was decided.
            world: What is known after it: Retry-After is when the load in it has fallen far enough.
        """
        wait_s = None
        if reason is RefusalReason.TTFT:
            wait_s = self._prefill(ask, placement, world).lost_wait_s()
        if wait_s is None:
            wait_s = self._decode(ask, placement, world).wait_s(1.0)
        return Refused.of(placement, reason, wait_s, placement.tbt_s)

    def limits(self, ask: Ask, placement: Placement, world: World) -> Limits:
        """What `Ledger.reserve` checks again, so that schedulers deciding at once cannot overrun the targets.

        The ledger compares what is promised now; what will have left by the time of arrival is added to the
        bounds. An idle instance is given room for this request whatever its size.
        """
        if self.mode is AdmissionMode.NONE:
            return Limits()
        queued_s = self._prefill(ask, placement, world).queue_limit_s()
        if self._waits_for_a_place(placement):
            # The place is taken when the prompt is computed, by `Ledger.seat`.
            return Limits(queued_s)
        decode = self._decode(ask, placement, world)
        return Limits(queued_s, decode.batch_limit(), decode.kv_limit_tokens())

    def _prefill(self, ask: Ask, placement: Placement, world: World) -> PrefillSide:
        return PrefillSide(ask, placement, world, self.mode, self.order)

    def _decode(
        self, ask: Ask, placement: Placement, world: World, by_rank: Placement | None = None
    ) -> DecodeSide:
        return DecodeSide(ask, placement, world, self.mode, self.headroom, by_rank)
