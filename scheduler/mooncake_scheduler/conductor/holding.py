"""Holding: a prefilled request waits for a place to decode while its time to the first token lasts.

Decode that is full at one moment seldom is for long, and a prompt that was computed is worth waiting for. Its
KV stays staged where it was computed, its first token is withheld, and the decode instance is chosen when
there is a place, not when the request arrived (late binding). Refusing it at once instead, as the papers'
baseline does, throws the prefill away.

Pure: time comes in as a parameter, who gets a place goes out as data. What the body then does about it is
checked again by `Ledger.seat`, over all schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from mooncake_core.ledger import InstanceLoad, SeatLimits
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import Ask, InstanceView, Slo
from mooncake_scheduler.conductor.placement import may_pair
from mooncake_scheduler.conductor.prediction import decode_now

MEMORY_RESERVE = 0.4
"""Of the share that is left free of the TBT target, what is left free of KV memory: what is promised has its
whole answer in it, and of a hundred requests not all answers are longer than predicted (ADR 32)."""
BURST = 16
"""Requests of this size that others may have promised to an instance since they were last heard of."""


class Held(msgspec.Struct, gc=False, eq=False):
    """A request whose prompt is computed and that has no place to decode yet."""

    ask: Ask
    prefill: Instance
    """Where its KV is staged."""
    wanted: str
    """The decode instance that was chosen at its arrival: kept where there is room."""
    slo: Slo
    arrived_s: float
    since_s: float
    """When its prompt was computed."""
    until_s: float
    """When it is given up."""


class Seat(NamedTuple):
    """A place for a request that waits."""

    held: Held
    decode: Instance


def seat_limits(
    instance: Instance, model: CostModel, slo: Slo, headroom: float, to_come_tokens: float = 0.0
) -> SeatLimits:
    """What a decode instance may carry with one more request: of TBT and KV memory, room for growth kept.

    Args:
        instance: which one.
        model: its costs; one that does not know decode yet is no ground to let anybody wait.
        slo: the request's targets.
        headroom: share of the TBT target that is filled; of memory it is more (`MEMORY_RESERVE`).
        to_come_tokens: of the KV that is promised to a request, what on average is not written yet: it takes
            its place, and no time yet.
    """
    judged = slo.tbt_s is not None and model.knows_decode
    return SeatLimits(
        batch=instance.max_batch,
        kv_tokens=int((1 - MEMORY_RESERVE * (1 - headroom)) * instance.kv_capacity_tokens),
        step_s=headroom * slo.tbt_s if judged and slo.tbt_s is not None else inf,
        base_s=model.t0_s,
        request_s=max(0.0, model.t1_s_per_request - model.t2_s_per_token * to_come_tokens),
        token_s=model.t2_s_per_token,
    )


def has_plenty(load: InstanceLoad, limits: SeatLimits, need_tokens: int) -> bool:
    """Whether a decode instance could take twice what is promised to it and a burst: then nobody need ask.

    What is known of other schedulers is a moment old. Only if they had promised as much again and `BURST`
    requests more meanwhile could somebody be one too many.

    Args:
        load: of the instance, the request in it.
        limits: as `seat_limits` gives them, less work that nobody promised.
        need_tokens: KV tokens of the request, its predicted output included.
    """
    batch = 2 * (load.batch + load.arriving) + BURST
    return limits.exceeded(batch, 2 * load.kv_tokens + BURST * need_tokens, need_tokens) is None


def _may_take(held: Held, decode: Instance) -> bool:
    return may_pair(held.prefill, decode)


class Line:
    """Those who wait: by priority, then by arrival; who fits may pass who does not.

    No place is kept free for one that is too large for what is free now. Keeping one, from half or four
    fifths of its time on, was tried: it refused half as many again and served fewer tokens, because what is
    kept free serves nobody meanwhile. Its time ends a large request's wait; most are not let into it
    (`waiting`).

    Args:
        limits: what a decode instance may carry, by the targets of who asks.
    """

    def __init__(self, limits: Callable[[Slo, Instance], SeatLimits]) -> None:
        self._limits = limits
        self._held: dict[str, Held] = {}
        self._order: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def held(self) -> Sequence[Held]:
        """All of them, the next one first."""
        return self._order

    @property
    def kv_tokens(self) -> int:
        """Of prompts staged."""
        return sum([held.ask.prompt_tokens for held in self._order])

    def join(self, held: Held) -> None:
        """Get in line.

        Raises:
            ValueError: it waits already.
        """
        if held.ask.id in self._held:
            raise ValueError(f"{held.ask.id} waits for a place already")
        self._held[held.ask.id] = held
        self._order.append(held)
        self._order.sort(key=_rank)

    def leave(self, request_id: str) -> Held | None:
        """Leave the line, for whatever reason; None for one who does not wait."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._order.remove(held)
        return held

    def overdue(self, now_s: float) -> list[Held]:
        """Those whose time has passed."""
        return [held for held in self._order if now_s >= held.until_s]

    def seats(
        self,
        now_s: float,
        decode: Sequence[InstanceView],
        cost: CostModels,
        can_take: Callable[[Held, Instance], bool] = _may_take,
    ) -> list[Seat]:
        """Who gets a place now, and where; they stay in line until they `leave`.

        Args:
            now_s: the moment.
            decode: the decode instances with their present load.
            cost: their costs.
            can_take: whether a decode instance can take what is staged for somebody.
        """
        rooms = [_Room(view.instance, view.load, cost.of(view.instance), self._limits) for view in decode]
        seats = []
        for held in self._order:
            free = [room for room in rooms if room.fits(held) and can_take(held, room.instance)]
            if free:
                room = next((room for room in free if room.instance.id == held.wanted), None)
                room = room or min(free, key=lambda room: room.step_s(held))
                seats.append(Seat(held, room.instance))
                room.take(held)
        return seats


def _rank(held: Held) -> tuple[int, float, str]:
    return -held.ask.priority, held.arrived_s, held.ask.id


class _Room:
    """What decodes at an instance, as far as it is given away in one look."""

    __slots__ = ("_batch", "_kv_tokens", "_limits", "_limits_of", "_model", "_slo", "instance")

    def __init__(
        self,
        instance: Instance,
        load: InstanceLoad,
        model: CostModel,
        limits_of: Callable[[Slo, Instance], SeatLimits],
    ) -> None:
        self.instance = instance
        self._limits_of = limits_of
        self._model = model
        self._batch, self._kv_tokens, _ = decode_now(load)
        self._slo: Slo | None = None
        self._limits = SeatLimits()

    def fits(self, held: Held) -> bool:
        if held.slo is not self._slo:
            # Mostly the same for all.
            self._slo = held.slo
            self._limits = self._limits_of(held.slo, self.instance)
        return self._limits.exceeded(self._batch, self._kv_tokens, _need_tokens(held)) is None

    def step_s(self, held: Held) -> float:
        return self._model.step_s(self._batch + 1, self._kv_tokens + _need_tokens(held))

    def take(self, held: Held) -> None:
        self._batch += 1
        self._kv_tokens += _need_tokens(held)


def _need_tokens(held: Held) -> int:
    return held.ask.prompt_tokens + held.ask.output_tokens
