"""The side of decode: the time between tokens and the KV memory that a placement would meet there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import floor, inf

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import RefusalReason
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import Ask, Placement, Refused, World, view_of
from mooncake_scheduler.conductor.prediction import DecodeLoad, decode_at, decode_course, decode_now
from mooncake_scheduler.conductor.waiting import LEAST_CHANCE, PlaceWaits


class DecodeSide:
    """One placement before its decode instance.

    Args:
        ask: The request.
        placement: With the TTFT that is promised for it.
        world: What was known when it was chosen.
        mode: When it is looked.
        headroom: Share of the TBT target and of KV memory that is filled.
        by_rank: The placement without its promise, where that brings it forward.
    """

    __slots__ = (
        "_ask", "_by_rank", "_headroom", "_instance", "_load", "_mode", "_model", "_need_tokens",
        "_placement", "_world",
    )  # fmt: skip

    def __init__(
        self,
        ask: Ask,
        placement: Placement,
        world: World,
        mode: AdmissionMode,
        headroom: float,
        by_rank: Placement | None = None,
    ) -> None:
        self._ask = ask
        self._placement = placement
        self._by_rank = by_rank or placement
        self._world = world
        self._mode = mode
        self._headroom = headroom
        self._need_tokens = ask.prompt_tokens + ask.output_tokens
        self._instance = placement.decode
        self._model: CostModel = world.cost.of(placement.decode)
        self._load = view_of(placement.decode, world.decode, world.prefill).load

    # Whether there is room

    def has_to_wait(self, share: float) -> RefusalReason | None:
        """What is predicted to be full when it reaches decode; None where it gets a place at once."""
        return self._reason_at_arrival(share)

    def wait_refusal(self, share: float, waits: PlaceWaits, within_s: float) -> Refused | None:
        """A refusal where decode is full and no place is likely to be free before the first token is due.

        Args:
            share: Part of the limits that the request may fill.
            waits: How those fared lately who waited.
            within_s: Seconds for which it may wait once its prompt is computed.
        """
        reason = self.has_to_wait(share)
        if reason is None:
            return None
        chance = waits.chance(self._need_tokens, within_s, self._world.now_s)
        wait_s = self.wait_s(share)
        if wait_s <= within_s if chance is None else chance >= LEAST_CHANCE:
            return None
        return Refused.of(self._placement, reason, wait_s, self._tbt_s(self._seen_load()))

    def refusal_now(self) -> Refused | None:
        """A refusal of a decode that would start now, by what decodes at this moment."""
        load = decode_now(self._load)
        reason = self._decode_reason(load, load.kv_tokens, 1.0)
        if reason is None:
            return None
        return Refused.of(self._placement, reason, self.wait_s(1.0), self._tbt_s(load))

    def refusal(self, share: float) -> Refused | None:
        """A refusal for decode's TBT or KV memory, as seen by the mode; Retry-After from the buckets."""
        load = self._seen_load()
        reason = self._reason_at_arrival(share, self._held_kv_tokens(load, share))
        if reason is None:
            return None
        return Refused.of(self._placement, reason, self.wait_s(share), self._tbt_s(load))

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
        if self._fits(held, share) or self._mode is not AdmissionMode.PREDICTIVE:
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
        if by_rank is self._placement or self._mode is AdmissionMode.EARLY:
            return (seen,)
        now_s = self._world.now_s
        until_s = now_s + by_rank.ttft_s
        course = decode_course(self._load, now_s, now_s + self._placement.ttft_s)
        between = [load for _, load in takewhile(lambda each: each[0] <= until_s, course)]
        return (*between, decode_at(self._load, now_s, until_s))

    def _seen_load(self) -> DecodeLoad:
        if self._mode is AdmissionMode.EARLY:
            return decode_now(self._load)
        if self._placement.arrival is not None:
            return self._placement.arrival
        now_s = self._world.now_s
        return decode_at(self._load, now_s, now_s + self._placement.ttft_s)

    def _tbt_s(self, load: DecodeLoad) -> float:
        return self._model.step_s(load[0] + 1, load[1] + self._need_tokens)

    def wait_s(self, share: float) -> float:
        """Seconds until an arrival one TTFT later would find room, as far as the buckets tell."""
        now_s = self._world.now_s
        from_s = now_s + self._by_rank.ttft_s
        at_s = from_s
        for at_s, load in decode_course(self._load, now_s, from_s):  # noqa: B007 - the last counts
            if self._decode_reason(load, load.kv_tokens, share) is None:
                break
        return at_s - from_s

    # What `Ledger.reserve` checks again

    def batch_limit(self) -> int:
        """`Limits.batch`: promised now, and as many more as fit into the predicted load."""
        load = self._seen_load()
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

    def kv_limit_tokens(self) -> int:
        """`Limits.kv_tokens`: promised now, and as many more as fit when the request arrives."""
        capacity = self._instance.kv_capacity_tokens
        if not capacity:
            return 0
        held = self._held_kv_tokens(self._seen_load(), 1.0)
        room = max(0, int(self._headroom * capacity) - held)
        if held == 0:
            room = max(room, self._need_tokens)
        return self._load.kv_tokens + room
