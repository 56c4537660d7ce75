"""The leg of an attempt whose answer is the client's: gathered, or streamed as it comes."""

from __future__ import annotations

import time

from mooncake_core.index import Tier
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.answers import usage_of, with_cached_tokens, without_kv_params
from mooncake_scheduler.gateway.flow import ClientLeftError, DeadlineError
from mooncake_scheduler.gateway.http1.heads import JSON
from mooncake_scheduler.gateway.legs import Leg, StreamLeg
from mooncake_scheduler.gateway.lifecycle import Phase, Setback, setback_of_status
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.sending import Failure, Sending


class Answering(Sending):
    """Sends that leg, and its answer to the client.

    Args:
        services: the parts of the gateway.
        job: the request.
        placement: where it goes.
    """

    _source: Member | None = None
    """Where the KV is staged that the answering engine may not have taken yet."""

    async def _whole(self, member: Member) -> Failure | None:
        """Let one engine serve it from start to end."""
        job, config = self._job, self._services.config
        job.enter(Phase.HANDED_OVER)
        job.handed_over_s = 0.0
        body = engines.whole_body(job.wish.body, job.put)
        leg = self._answering_leg(None)
        await self._believe(member.instance, self._placement.ttft_s)
        if job.wish.streams and self._placement.prefill is None:
            self._computes(member)
        failure = await self._answer(
            leg, member, body, config.prefill_timeout_s + config.first_token_timeout_s
        )
        if failure is None:
            self._services.accounting.served_whole(job, member)
            if member.instance.store:
                await self._services.residency.holds(member.instance.store, job.keys, Tier.DRAM)
        return failure

    def _answering_leg(self, cached_tokens: int | None) -> Leg:
        job = self._job
        if not job.wish.streams:
            return Leg(job.flow)
        return StreamLeg(
            job.flow, job.exchange, job.head, cached_tokens, self._services.config.stall_timeout_s
        )

    async def _answer(self, leg: Leg, member: Member, body: bytes, first_s: float) -> Failure | None:
        """Send the leg; None when the client has its answer.

        Raises:
            DeadlineError: the request's own deadline has passed; the leg goes on.
        """
        if isinstance(leg, StreamLeg):
            return await self._stream(leg, member, body, first_s)
        job = self._job
        setback = await self._gather(leg, member, self._headers(), body, self._answer_limit_s(first_s))
        if setback is not None:
            return self._failed(member, leg, setback)
        job.first_s = time.monotonic()
        # The ledger is told by the release alone, which follows at once.
        job.enter(Phase.DECODING)
        answer = leg.answer
        job.usage = usage_of(answer)
        if job.cached_tokens is not None:
            answer = with_cached_tokens(answer, job.cached_tokens)
        self._served(member)
        job.exchange.respond(leg.status, without_kv_params(answer), leg.content_type or JSON, job.head)
        return None

    async def _stream(self, leg: StreamLeg, member: Member, body: bytes, first_s: float) -> Failure | None:
        job = self._job
        setback: Setback | None
        try:
            self._dispatch(leg, member, self._headers(), body, first_s)
            await leg.first()
            if leg.begun:
                job.first_s = leg.first_s
                job.gaps_s = leg.gaps_s
                self._begun()
                job.unbind()
                job.limit(self._services.config.stall_timeout_s)
            await leg.finished()
            setback = leg.setback
            if setback is None and not (leg.begun and leg.stream.ended):
                setback = Setback.BROKEN
        except DeadlineError:
            if leg.begun and job.exchange.paused:
                # The engine went on; it is the client that does not read.
                leg.abort()
                job.exchange.connection.abort()
                raise ClientLeftError from None
            if job.overdue:
                raise
            leg.abort()
            setback = Setback.DEADLINE
        finally:
            job.last_s = leg.last_s
            job.events = leg.stream.events
        if setback is not None:
            return self._failed(member, leg, setback)
        error = leg.stream.last_error()
        if error is None:
            job.usage = leg.stream.last_usage()
            self._served(member)
        else:
            # The client has the engine's own words and its end mark, but no whole answer.
            leg.error_status = error[0]
            self._failed(member, leg, setback_of_status(error[0]) or Setback.SERVER_ERROR)
            job.decision.outcome = "broken"
        job.exchange.end()
        return None

    def _begun(self) -> None:
        """The first token has come: if the answering engine prefilled, it has done so."""
        job, services = self._job, self._services
        job.enter(Phase.DECODING)
        self._staged_taken()
        if not job.prefill_done:
            services.ledger.prefill_finished(job.ask.id, services.clock.now_s())
        if self._computing is not None:
            services.accounting.first_token(job, self._computing[0], self._placement, self._computed()[1])
        services.accounting.begun(job)

    def _staged_taken(self) -> None:
        """Decode no longer depends on the instance where its KV was staged."""
        source, self._source = self._source, None
        if source is not None:
            source.awaited.pop(self._job.flow, None)

    def _served(self, member: Member) -> None:
        self._services.roster.served(member)
        self._job.decision.outcome = "completed"
