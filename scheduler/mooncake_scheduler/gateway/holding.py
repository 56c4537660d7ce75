"""Prefilled requests that wait for a place to decode, and who of them gets one (`conductor.holding`).

Nothing is lost by choosing decode now: it is only sent a request when its prefill has ended (ADR 0013). What
waits here is a request whose KV is staged at its prefill instance and whose client has seen nothing yet.
Every scheduler has a line of its own; that no place is given twice is the ledger's work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import msgspec

from mooncake_core.ledger import Ledger, RefusalReason, SeatLimits
from mooncake_core.registry import Instance, InstanceState
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.holding import Held, has_plenty
from mooncake_scheduler.conductor.model import Ask, InstanceView, Slo
from mooncake_scheduler.conductor.placement import may_pair
from mooncake_scheduler.conductor.prediction import decode_now
from mooncake_scheduler.conductor.reports import NOTHING
from mooncake_scheduler.gateway.engines import pairs
from mooncake_scheduler.gateway.flow import DeadlineError, Flow, park
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.roster import Member

SeatLocally: TypeAlias = Callable[[str, str, SeatLimits, float], RefusalReason | None]


class HoldingPlace:
    """The line of one gateway before all decode instances.

    Args:
        placer: knows the instances, their loads and the Conductor.
        ledger: gives places away, over all schedulers.
        clock: model seconds.
        seat_locally: what `seat` of a shared ledger is replaced by while that one is away.
    """

    def __init__(
        self, placer: Placer, ledger: Ledger, clock: Clock, seat_locally: SeatLocally | None = None
    ) -> None:
        self._placer = placer
        self._ledger = ledger
        self._clock = clock
        self._seat_locally = seat_locally
        self._line = placer.conductor.line()
        self._flows: dict[str, Flow] = {}
        self._excluded: dict[str, Collection[str]] = {}
        """Instances that did not take what is staged for a request."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._line)

    @property
    def kv_tokens(self) -> int:
        """Of prompts that are staged for those who wait."""
        return self._line.kv_tokens

    def needed(self, ask: Ask, decode: Instance, slo: Slo) -> bool:
        """Whether a request has to ask for its place: not where there is plenty for all, and nobody waits.

        Asking is a question to Redis, which a request whose decode is far from full is spared.
        """
        if self._line:
            return True
        load = self._ledger.load(decode.id, self._clock.now_s())
        need_tokens = ask.prompt_tokens + ask.output_tokens
        return not has_plenty(load, self._limits(slo, decode), need_tokens)

    async def seat(
        self, job: Job, held: Held, *, anyway: bool = False, excluded: Collection[str] = ()
    ) -> Instance | RefusalReason:
        """Wait for a place, and take it.

        Args:
            job: the request; its prefill has ended, and the ledger was told that it is held.
            held: the same for the line.
            anyway: it is not refused: when its time is over it decodes where it was to, full or not.
            excluded: ids of the instances that are not to be given it.

        Returns:
            The decode instance at which it has a place now; or what was full until its time was over.

        Raises:
            Interruption: whatever came meanwhile; the request waits no longer.
        """
        self._line.join(held)
        self._flows[held.ask.id] = job.flow
        self._excluded[held.ask.id] = excluded
        try:
            while True:
                decode = self._offers().get(held.ask.id)
                if decode is not None and await self._take(job, held, decode):
                    return decode
                if await self._wait(job, held):
                    continue
                if anyway and (place := await self._take_wanted(job, held)) is not None:
                    return place
                return self._full(held)
        finally:
            self._line.leave(held.ask.id)
            del self._flows[held.ask.id], self._excluded[held.ask.id]

    def look(self) -> None:
        """Wake those for whom there is a place; to be called when one may have become free."""
        if not self._line:
            return
        for flow in [self._flows[request_id] for request_id in self._offers()]:
            flow.wake()

    async def _wait(self, job: Job, held: Held) -> bool:
        """Until there may be a place; False when its time is over."""
        left_s = held.until_s - self._clock.now_s()
        if left_s > 0:
            job.limit(left_s / self._clock.scale)
            try:
                await park()
            except DeadlineError:
                # The two clocks do not agree to the last digit: what is asked is whose deadline it was.
                if job.overdue:
                    raise
            else:
                return True
        self._placer.conductor.observe_place(held, self._clock.now_s(), found=False)
        return False

    async def _take(self, job: Job, held: Held, decode: Instance) -> bool:
        now_s = self._clock.now_s()
        if not await self._ask(job, held, decode, self._limits(held.slo, decode)):
            return False
        self._placer.conductor.observe_place(held, now_s, found=True)
        return True

    async def _take_wanted(self, job: Job, held: Held) -> Instance | None:
        member = self._placer.roster.members.get(held.wanted)
        if member is None or not await self._ask(job, held, member.instance, SeatLimits()):
            return None
        return member.instance

    async def _ask(self, job: Job, held: Held, decode: Instance, limits: SeatLimits) -> bool:
        """Ask the ledger for a place; False where another scheduler was quicker: look again."""
        # The ledger answers soon: the end of the wait must not cut off what is about to be a place. One whose
        # taking nobody sees would be given back by the release only.
        job.limit()
        job.flow.shielded = True
        try:
            reason = await self._seat(held.ask.id, decode.id, limits, self._clock.now_s())
        finally:
            job.flow.shielded = False
        job.flow.check()
        return reason is None

    async def _seat(
        self, request_id: str, decode: str, limits: SeatLimits, now_s: float
    ) -> RefusalReason | None:
        try:
            return await self._ledger.seat(request_id, decode, limits, now_s)
        except ConnectionError:
            if self._seat_locally is None:
                raise
            return self._seat_locally(request_id, decode, limits, now_s)

    def _offers(self) -> dict[str, Instance]:
        """For whom there is a place now, as far as this scheduler knows."""
        placer, now_s = self._placer, self._clock.now_s()
        instances = [each for team in placer.roster.teams() for each in team.decode] + self._draining()
        views = [InstanceView(each, placer.worlds.load(each.id, now_s)) for each in instances]
        seats = self._line.seats(now_s, views, placer.conductor.costs, self._can_take)
        return {seat.held.ask.id: seat.decode for seat in seats}

    def _draining(self) -> list[Instance]:
        """Instances that take nothing new, but those in line who were promised to them."""
        members = self._placer.roster.members
        wanted = [members.get(each) for each in {held.wanted for held in self._line.held}]
        return [each.instance for each in wanted if each is not None and _drains(each)]

    def _can_take(self, held: Held, decode: Instance) -> bool:
        member = self._placer.roster.members.get(decode.id)
        if member is not None and _drains(member) and held.wanted != decode.id:
            return False
        if decode.id in self._excluded[held.ask.id]:
            return False
        return (
            may_pair(held.prefill, decode)
            and pairs(held.prefill, decode)
            and (held.prefill.engine, held.prefill.engine_version) == (decode.engine, decode.engine_version)
        )

    def _limits(self, slo: Slo, decode: Instance) -> SeatLimits:
        """What the ledger checks: work that it does not know of takes its part."""
        limits = self._placer.conductor.seat_limits(slo, decode)
        foreign = self._placer.worlds.reported.foreign.get(decode.id, NOTHING)
        if foreign is NOTHING:
            return limits
        taken_s = limits.request_s * foreign.batch + limits.token_s * foreign.kv_tokens
        return msgspec.structs.replace(
            limits,
            batch=max(1, limits.batch - foreign.batch) if limits.batch else 0,
            kv_tokens=max(1, limits.kv_tokens - foreign.kv_tokens) if limits.kv_tokens else 0,
            step_s=max(0.0, limits.step_s - taken_s),
        )

    def _full(self, held: Held) -> RefusalReason:
        """What is full where it was to decode."""
        member = self._placer.roster.members.get(held.wanted)
        if member is None:
            return RefusalReason.TTFT
        load = decode_now(self._placer.worlds.load(held.wanted, self._clock.now_s()))
        limits = self._placer.conductor.seat_limits(held.slo, member.instance)
        need_tokens = held.ask.prompt_tokens + held.ask.output_tokens
        return limits.exceeded(load.batch, load.kv_tokens, need_tokens) or RefusalReason.TTFT


def _drains(member: Member) -> bool:
    return member.state is InstanceState.DRAINING
