"""Carrying out one placement: the prefill leg, the hand-over and the decode leg, or one leg for all.

Sequential also over Mooncake, where both legs might overlap: a decode that waits for a prefill which died
hangs for minutes (ADR 0013).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from math import inf

import msgspec
import structlog

from mooncake_core.ledger import RefusalReason
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.answering import Answering
from mooncake_scheduler.gateway.flow import ClientLeftError, DeadlineError, Interruption, StagedLostError
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.legs import Leg, StreamLeg
from mooncake_scheduler.gateway.lifecycle import Phase, Setback
from mooncake_scheduler.gateway.prefilling import Prefilling
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.sending import Failure, Staged
from mooncake_scheduler.gateway.services import Services

_log = structlog.get_logger(__name__)

RELEASE_GRACE_S = 2.0
"""Wall seconds a decode whose client left is given to take the staged KV, when nothing tells that it has."""
UNTOLD_S = 10.0
"""Wall seconds for which a whole answer may still wait for its staged KV, which nothing tells: longer than it
takes to notice that an instance died, and short enough not to throw long decodes away."""


class Attempt(Prefilling, Answering):
    """One try at serving a job with the instances of one placement.

    Args:
        services: the parts of the gateway.
        job: the request.
        placement: where it goes; its reservation is held by the job.
    """

    def __init__(self, services: Services, job: Job, placement: Placement) -> None:
        super().__init__(services, job, placement)
        self._late: Leg | None = None
        """A decode under way that the client waits for no more: it has to take the staged KV still."""

    @property
    def owes(self) -> bool:
        """KV is staged that nothing frees but `free`."""
        return self._undecoded is not None or self._late is not None

    async def carry_out(self) -> Failure | None:
        """Serve the job; None when its answer has ended.

        Raises:
            ClientLeftError: the client left; the engines were told.
            ErrorAnswer: 429, decode has no room (at once in mode `none`, else when the time to wait for it is
                over). It may owe (`free`).
            DeadlineError: the request's own deadline has passed. It may owe.
        """
        placement = self._placement
        members = self._services.roster.members
        decode = members.get(placement.decode.id)
        prefill = None if placement.prefill is None else members.get(placement.prefill.id)
        if decode is None or (prefill is None and placement.prefill is not None):
            # It left while the place was taken, and nobody is offered it again.
            return Failure(None, Setback.GONE, self._job.phase)
        try:
            if prefill is None or not engines.pairs(prefill.instance, decode.instance):
                self._needs_no_turn()
                return await self._whole(decode)
            turn = await self._turn(prefill)
            if isinstance(turn, Failure):
                return turn
            staged = await self._prefill(turn)
            if isinstance(staged, Failure):
                return staged
            self._check_decode(staged)
            if not staged.answer.by_length:
                # Ended in another way its KV may be gone already: decode computes the prompt itself.
                return await self._whole(decode)
            return await self._decode_in_time(staged, decode, ())
        except ClientLeftError:
            await self.free()
            raise
        finally:
            self.abort()

    async def hand_over_again(self, staged: Staged, excluded: Collection[str]) -> Failure | None:
        """Let the placement's decode instance take what another one did not; as `carry_out`.

        Args:
            staged: the KV.
            excluded: ids of the instances that did not.
        """
        job, services = self._job, self._services
        self._holds = self._asks_for_a_place()
        services.ledger.prefill_finished(job.ask.id, services.clock.now_s(), held=self._holds)
        job.prefill_done = not self._holds
        self._undecoded = staged
        try:
            # What came while it was reserved is no fault of the instance that is asked next.
            job.flow.check()
            self._undecoded = None
            decode = services.roster.members.get(self._placement.decode.id)
            return await self._decode_in_time(staged, decode, excluded)
        except ClientLeftError:
            await self.free()
            raise
        finally:
            self.abort()

    async def _decode_in_time(
        self, staged: Staged, decode: Member | None, excluded: Collection[str]
    ) -> Failure | None:
        """Decode as soon as there is a place."""
        if self._holds:
            place = await self._seat(staged, excluded)
            if isinstance(place, Failure):
                return place
            decode = place
        if decode is None:
            # It left while the place was taken.
            return Failure(None, Setback.GONE, self._job.phase, staged)
        return await self._decode(decode, staged)

    async def _seat(self, staged: Staged, excluded: Collection[str]) -> Member | Failure:
        """Wait until decode has a place for what is staged."""
        job, services, placement = self._job, self._services, self._placement
        world, conductor = job.decision.world, services.placer.conductor
        assert world is not None
        now_s, scale = services.clock.now_s(), services.clock.scale
        arrived_s = now_s - (time.monotonic() - job.received_s) * scale
        held = conductor.hold(job.ask, placement, world.slo, arrived_s, now_s)
        staged.member.awaited[job.flow] = inf
        try:
            # Of another attempt it was said before that it is admitted.
            place = await services.holding.seat(
                job, held, anyway=job.decision.attempts > 1, excluded=excluded
            )
        except StagedLostError:
            services.engine_ids.forget(staged.member.instance.id)
            return Failure(staged.member, Setback.BROKEN, job.phase)
        except (ClientLeftError, DeadlineError):
            self._undecoded = staged
            raise
        finally:
            staged.member.awaited.pop(job.flow, None)
            waited_before_s = job.decision.decode_wait_s or 0.0
            job.decision.decode_wait_s = waited_before_s + services.clock.now_s() - now_s
        if isinstance(place, RefusalReason):
            services.metrics.wasted_prefill()
            self._undecoded = staged
            waited_s = services.clock.now_s() - arrived_s
            raise services.placer.no_place(place, job.ask, placement, world, waited_s)
        job.prefill_done = True
        self._placement = job.placement = job.decision.placement = msgspec.structs.replace(
            placement, decode=place
        )
        member = services.roster.members.get(place.id)
        return Failure(None, Setback.GONE, job.phase, staged) if member is None else member

    async def _decode(self, member: Member, staged: Staged) -> Failure | None:
        """Hand over and stream the answer."""
        job, services = self._job, self._services
        prefill = staged.member.instance
        body = engines.decode_body(
            job.wish.body, prefill, staged.transfer_id, staged.engine_id, staged.answer, job.put
        )
        job.enter(Phase.HANDED_OVER)
        job.handed_over_s = time.monotonic() if job.wish.streams else 0.0
        leg = self._answering_leg(staged.answer.cached_tokens)
        await self._believe(member.instance, 0.0)
        self._source = staged.member
        until_s = inf if job.wish.streams else time.monotonic() + UNTOLD_S
        staged.member.awaited[job.flow] = until_s
        try:
            failure = await self._answer(leg, member, body, services.config.first_token_timeout_s)
        except StagedLostError:
            _log.warning("staged KV was lost", request_id=job.request_id, instance=prefill.id)
            self.abort()
            services.engine_ids.forget(prefill.id)
            return Failure(staged.member, Setback.BROKEN, job.phase)
        except ClientLeftError:
            self._staged_taken()
            await self._let_staged_go(leg)
            raise
        except DeadlineError:
            if job.phase is Phase.HANDED_OVER:
                # The client is told first.
                self._late, self._leg = leg, None
            raise
        finally:
            self._staged_taken()
        if failure is None:
            return None
        services.engine_ids.forget(prefill.id)
        return failure._replace(staged=staged)

    def _check_decode(self, staged: Staged) -> None:
        """Mode `none`: decode looks for itself when the prefill has ended; told so by `_prefill`."""
        refused, self._refused = self._refused, None
        if refused is None:
            return
        self._services.metrics.wasted_prefill()
        if staged.answer.by_length:
            self._undecoded = staged
        raise refused

    # -- freeing what is staged

    def owe(self, staged: Staged) -> None:
        """What another attempt has left staged is to be freed by this one's decode instance."""
        self._undecoded = staged

    async def free(self) -> None:
        """Let a decode instance take KV that nobody wants, if there is any; nothing else frees it."""
        staged, self._undecoded = self._undecoded, None
        late, self._late = self._late, None
        try:
            if staged is not None:
                await self._discard(staged)
            elif late is not None:
                self._leg = late
                await self._let_staged_go(late)
        except Interruption:
            # Nothing more is tried.
            return
        finally:
            self.abort()

    async def _discard(self, staged: Staged) -> None:
        """Decode is sent for one token and its answer is dropped (routers.md §4, entry 1)."""
        job, services = self._job, self._services
        job.unbind()
        job.limit(services.config.dispatch_timeout_s)
        if staged.member.instance.connector == "MooncakeConnector" and not staged.engine_id:
            asked = await self._engine_id(staged.member, staged.rank)
            if isinstance(asked, Failure):
                return
            staged = staged.known(asked.engine_id)
        member = services.roster.members.get(self._placement.decode.id)
        if member is None:
            return
        body = engines.release_body(
            job.wish.body,
            staged.member.instance,
            staged.transfer_id,
            staged.engine_id,
            staged.answer,
            job.put,
        )
        leg = Leg(job.flow)
        await self._gather(leg, member, self._headers(), body, services.config.first_token_timeout_s)

    async def _let_staged_go(self, leg: Leg) -> None:
        """Let a decode whose client left take the staged KV, which frees it at the prefill instance.

        A stream tells when that has happened: with its first token. For whole answers a grace has to do.
        """
        streams = isinstance(leg, StreamLeg)
        self._job.unbind()
        self._job.limit(self._services.config.first_token_timeout_s if streams else RELEASE_GRACE_S)
        try:
            await (leg.first() if isinstance(leg, StreamLeg) else leg.finished())
        except DeadlineError:
            return
