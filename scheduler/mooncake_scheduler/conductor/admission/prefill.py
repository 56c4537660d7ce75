"""The side of prefill: the TTFT of a placement, and what may be promised for it."""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import RefusalReason, Waiting
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import Ask, Placement, Refused, World, view_of
from mooncake_scheduler.conductor.order import ROUNDING_S, QueueOrder
from mooncake_scheduler.conductor.placement import estimate_decode


class PrefillSide:
    """One placement before the instance that computes its prompt.

    Args:
        ask: The request.
        placement: What a policy chose for it.
        world: What was known when it chose.
        mode: When it is looked.
        order: In which prefills take turns; None = as they came.
    """

    __slots__ = ("_ask", "_load", "_mode", "_model", "_order", "_placement", "_world")

    def __init__(
        self, ask: Ask, placement: Placement, world: World, mode: AdmissionMode, order: QueueOrder | None
    ) -> None:
        self._ask = ask
        self._placement = placement
        self._world = world
        self._mode = mode
        # Who prefills where it decodes does not wait for a turn.
        self._order = None if placement.prefill is None else order
        instance = placement.prefill or placement.decode
        self._model: CostModel = world.cost.of(instance)
        self._load = view_of(instance, world.prefill, world.decode).load

    def limit_s(self) -> float | None:
        """The predicted TTFT with which the target is still met as often as promised.

        The other modes are the paper's, which take predictions at their word.
        """
        target_s = self._world.slo.ttft_s
        if target_s is None or self._mode is not AdmissionMode.PREDICTIVE:
            return target_s
        return target_s / self._model.ttft_margin

    def refusal(self, share: float) -> Refused | None:
        """A refusal for a TTFT beyond its limit; Retry-After is when enough of the queue has drained."""
        limit_s = self.limit_s()
        ttft_s = self._placement.ttft_s
        if limit_s is not None and ttft_s > share * limit_s:
            ttft_s = min(ttft_s, self._earliest_ttft_s())
        if limit_s is None or ttft_s <= share * limit_s or not self._model.knows_prefill or self._idle:
            return None
        # The queue drains a second a second; the rest of the TTFT does not wait.
        wait_s = min(ttft_s - share * limit_s, self._placement.queue_s)
        return Refused.of(self._placement, RefusalReason.TTFT, wait_s, self._placement.tbt_s)

    def lost_wait_s(self) -> float | None:
        """Seconds until a place in the queue that others took is free again; None without a target."""
        limit_s = self.limit_s()
        if limit_s is None:
            return None
        queue_s = self._load.queued_s
        ttft_s = queue_s + self._placement.transfer_s + self._placement.prefill_s
        return min(max(0.0, ttft_s - limit_s), queue_s)

    # Promises

    def as_promised(self) -> Placement:
        """The placement brought forward, where it is in time only with a promise; else as it is."""
        placement, limit_s, order = self._placement, self.limit_s(), self._order
        if order is None or limit_s is None or placement.ttft_s <= limit_s:
            return placement
        if not self._model.knows_prefill or self._earliest_ttft_s() > limit_s:
            return placement
        world = self._world
        now_s = world.now_s
        newcomer = self._newcomer(now_s + limit_s - placement.transfer_s)
        queue_s = order.join(self._load, newcomer, now_s).queue_s
        ttft_s = placement.transfer_s + queue_s + placement.prefill_s
        decode = view_of(placement.decode, world.decode, world.prefill)
        found = estimate_decode(self._ask, decode, world.cost.of(decode.instance), now_s, now_s + ttft_s)
        return replace(placement, queue_s=queue_s, ttft_s=ttft_s, tbt_s=found.tbt_s, arrival=found.load)

    def promise_s(self, ttft_s: float) -> float:
        """The TTFT that can be promised to a request that is predicted to have this one; inf = none."""
        limit_s = self.limit_s()
        if limit_s is None or self._order is None or not self._model.knows_prefill or ttft_s > limit_s:
            return inf
        return limit_s

    def _earliest_ttft_s(self) -> float:
        """The least TTFT that it can have with all promises kept; without an order there is only the one."""
        placement, order, now_s = self._placement, self._order, self._world.now_s
        if order is None:
            return placement.ttft_s
        drain_s = self._drain_s()
        end_s = order.earliest_end_s(self._load, placement.prefill_s - drain_s, now_s)
        return placement.transfer_s + end_s + drain_s - now_s

    def _newcomer(self, latest_end_s: float) -> Waiting:
        drain_s = self._drain_s()
        cost_us = int((self._placement.prefill_s - drain_s) * 1e6)
        return Waiting(self._world.now_s, cost_us, latest_end_s - drain_s)

    def _drain_s(self) -> float:
        """Of the prefill, what later stages take while the next one already runs: nobody queues for that."""
        return self._model.drain_s(self._ask.prompt_tokens, self._placement.prefix_tokens)

    def queue_limit_s(self) -> float:
        """`Limits.queued_s`: what the TTFT's limit leaves after the transfer.

        Where turns are taken in an order, it is what is queued and as much more as breaks no promise.
        """
        placement, order = self._placement, self._order
        if order is not None:
            load, now_s = self._load, self._world.now_s
            newcomer = self._newcomer(now_s + placement.promised_ttft_s - placement.transfer_s)
            more_s = order.slack_s(load, newcomer, now_s) + ROUNDING_S
            return load.queued_s + placement.prefill_s - self._drain_s() + more_s
        ttft_limit_s = self.limit_s()
        if ttft_limit_s is None or not self._model.knows_prefill:
            return inf
        drain_s = self._drain_s()
        occupied_s = placement.prefill_s - drain_s
        limit_s = ttft_limit_s - placement.transfer_s - drain_s
        return occupied_s if limit_s < occupied_s and self._idle else limit_s

    @property
    def _idle(self) -> bool:
        return self._load.queued == 0 and self._load.queued_s <= 0
