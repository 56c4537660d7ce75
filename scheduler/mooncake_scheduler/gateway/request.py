"""One request from its last byte to its answer's last byte (lifecycle.py names the phases).

The coroutine is driven by a `Flow`: it is woken by the engines' answers and interrupted when the client
leaves or a phase takes too long. Whatever happens, its reservation is released.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine

import msgspec
import structlog

from mooncake_scheduler.conductor.model import Ask
from mooncake_scheduler.gateway.attempt import Attempt
from mooncake_scheduler.gateway.body import Prompt
from mooncake_scheduler.gateway.errors import ErrorAnswer, upstream_failed
from mooncake_scheduler.gateway.flow import ClientLeftError, DeadlineError
from mooncake_scheduler.gateway.http1.heads import JSON
from mooncake_scheduler.gateway.job import Job, read_wish
from mooncake_scheduler.gateway.lifecycle import Phase, Remedy, Setback, remedy
from mooncake_scheduler.gateway.passing import answer_to
from mooncake_scheduler.gateway.sending import Failure, Staged
from mooncake_scheduler.gateway.services import Services
from mooncake_scheduler.gateway.tokens import Domain, Prefix

_log = structlog.get_logger(__name__)

MAX_RETRIES = 2
"""Of what engines saw and did not serve."""


class Request:
    """A completion or a chat being served.

    Args:
        services: the parts of the gateway.
        job: the request.
    """

    def __init__(self, services: Services, job: Job) -> None:
        self._services = services
        self._job = job
        self._met_back_pressure = False
        self._not_reached = 0
        """Setbacks of instances that never saw it: trying another one costs no engine anything."""
        self._left: list[Staged] = []
        """KV of attempts given up, which decode may not have taken."""
        self._excluded: set[str] = set()
        """Ids of the instances that failed it."""

    async def run(self) -> None:
        """Serve it. Every path ends with an answer (or a client that left) and nothing reserved."""
        job = self._job
        try:
            await self._serve()
        except ErrorAnswer as answer:
            self._say(answer)
        except ClientLeftError:
            job.decision.outcome = "cancelled"
            self._services.metrics.cancelled(job.phase)
        except DeadlineError:
            self._say(_too_late())
        except Exception:
            _log.exception("a request failed in the gateway", request_id=job.request_id)
            self._say(ErrorAnswer(500, "the gateway failed: this is a bug", "server_error", "internal"))
        finally:
            job.enter(Phase.DONE)
            try:
                # Before the release: what is measured was measured with this request in the batch.
                self._services.accounting.finished(job)
            finally:
                self._release()
                self._log_end()
        # The client has its answer by now, or is gone.
        await self._free_left()

    def _log_end(self) -> None:
        job, turn_log = self._job, self._services.turn_log
        if turn_log is not None and job.placement is not None:
            stored = bool(job.prefilled_s) or job.decision.outcome == "completed"
            turn_log.ended(job.engine_id, stored=stored)

    async def _serve(self) -> None:
        job, services = self._job, self._services
        job.limit(services.config.tokenise_timeout_s)
        job.wish = read_wish(job.exchange.body, chat=job.exchange.path.endswith(b"/chat/completions"))
        began_s = time.monotonic()
        prefix = await self._tokenise()
        services.metrics.tokenise_s.observe(time.monotonic() - began_s)
        job.keys = prefix.keys
        if prefix.ids_json is not None:
            job.put = {"prompt": prefix.ids_json}
        job.enter(Phase.TOKENISED)
        tenant = job.caller.tenant
        output = services.placer.conductor.expected_output_tokens(tenant, prefix.tokens, job.wish.max_tokens)
        job.ask = Ask(job.engine_id, prefix.tokens, output, tenant, job.caller.priority)
        job.decision.ask = job.ask
        job.limit(services.config.place_timeout_s)
        match_from_s = time.monotonic()
        job.depths = await services.residency.match(prefix.keys)
        services.metrics.match_s.observe(time.monotonic() - match_from_s)
        job.decision.index = services.residency.mode
        services.budget.request()
        failure = await self._try(None)
        while failure is not None:
            failure = await self._try(failure)

    async def _tokenise(self) -> Prefix:
        services, wish = self._services, self._job.wish
        body = wish.body
        salt = body.text("cache_salt") if "cache_salt" in body.fields else None
        lora = wish.model if wish.model and wish.model != services.config.model else None
        domain = Domain(services.roster.block_size_tokens, lora, salt)
        if wish.form is Prompt.IDS:
            return services.tokens.of_ids(body, domain)
        return await services.tokens.of_text(body, wish.form, domain)

    async def _try(self, before: Failure | None) -> Failure | None:
        """Place the job and carry the placement out; a failure comes back when it is to be placed anew."""
        await self._place(before)
        job, services = self._job, self._services
        assert job.placement is not None
        attempt = Attempt(services, job, job.placement)
        failure = await self._ended(attempt, attempt.carry_out())
        while failure is not None:
            match self._remedy(failure):
                case Remedy.END_STREAM:
                    job.decision.outcome = "broken"
                    broken = upstream_failed(
                        "the stream broke off: the answer is not complete", "stream_broken"
                    )
                    job.exchange.write(broken.event())
                    job.exchange.end()
                    return None
                case Remedy.HAND_OVER_AGAIN if again := await self._taken_over(failure):
                    assert failure.staged is not None
                    failure = await self._ended(again, again.hand_over_again(failure.staged, self._excluded))
                case Remedy.HAND_OVER_AGAIN | Remedy.PLACE_ANEW:
                    self._leave(failure)
                    self._release()
                    job.enter(Phase.TOKENISED)
                    job.ask = msgspec.structs.replace(job.ask, id=self._next_id())
                    return failure
                case _:
                    self._leave(failure)
                    raise answer_to(failure, services.roster)
        return None

    async def _ended(
        self, attempt: Attempt, serving: Coroutine[object, None, Failure | None]
    ) -> Failure | None:
        """What came of an attempt; None when the client has its answer."""
        try:
            return await serving
        except (ErrorAnswer, DeadlineError) as ended:
            answer = ended if isinstance(ended, ErrorAnswer) else _too_late()
            self._note_refusal(answer)
            if not attempt.owes:
                raise
            # The client hears at once that it is not served, then the KV staged for it is freed.
            self._say(answer)
            self._release()
            await attempt.free()
            return None

    async def _place(self, before: Failure | None) -> None:
        job, services = self._job, self._services
        job.limit(services.config.place_timeout_s)
        # A reservation whose answer nobody sees would never be released.
        job.flow.shielded = True
        try:
            placement, world = await services.placer.place(
                job.ask,
                job.depths,
                whole=job.wish.whole,
                excluded=self._excluded,
                again=before is not None,
                degraded=not self._met_back_pressure,
            )
        except ErrorAnswer as answer:
            if before is not None:
                raise answer_to(before, services.roster) from None
            if answer.refused is None:
                services.metrics.refused(answer.code or "")
            self._note_refusal(answer)
            raise
        finally:
            job.flow.shielded = False
        job.enter(Phase.PLACED)
        job.enter(Phase.RESERVED)
        job.limit(services.config.dispatch_timeout_s)
        job.reserved = job.ask.id
        job.prefill_done = False
        job.prefilled_s = 0.0
        job.placement = placement
        decision = job.decision
        decision.attempts += 1
        decision.placement = placement
        decision.world = world
        if before is None:
            services.metrics.admitted()
            services.metrics.overhead(time.monotonic() - job.received_s)
            services.placer.conductor.observe_admitted(job.ask, world.now_s)
            if services.turn_log is not None:
                services.turn_log.came(job.engine_id, job.caller.tenant, job.keys)
        # What came while the place was taken is nobody's fault that is asked after this.
        job.flow.check()

    def _note_refusal(self, answer: ErrorAnswer) -> None:
        if answer.refused is None:
            return
        self._services.metrics.refused(answer.code or "")
        decision = self._job.decision
        decision.refused = answer.refused.reason
        decision.placement = answer.refused.placement
        decision.world = answer.world
        if answer.world is not None:
            self._services.placer.conductor.observe_refused(self._job.ask, answer.world.now_s)

    def _remedy(self, failure: Failure) -> Remedy:
        job, services = self._job, self._services
        if failure.member is not None:
            self._excluded.add(failure.member.instance.id)
        self._met_back_pressure |= failure.setback is Setback.BACK_PRESSURE
        retries = job.decision.attempts - 1 - self._not_reached
        reached = failure.setback not in (Setback.CONNECT, Setback.GONE)
        self._not_reached += not reached
        what = remedy(
            failure.phase,
            failure.setback,
            staged=failure.staged is not None,
            # Each instance is tried once, so that this ends.
            may_retry=not reached or (retries < MAX_RETRIES and not services.budget.empty),
        )
        services.metrics.setback(failure.setback, what)
        if reached and what in (Remedy.PLACE_ANEW, Remedy.HAND_OVER_AGAIN):
            services.budget.spend()
        return what

    async def _taken_over(self, failure: Failure) -> Attempt | None:
        """An attempt with another decode instance for the staged KV, reserved; None when there is none."""
        job, services = self._job, self._services
        assert failure.staged is not None
        assert job.placement is not None
        decode = services.placer.another_decode(failure.staged.member.instance, self._excluded)
        if decode is None:
            return None
        job.limit(services.config.dispatch_timeout_s)
        self._release()
        job.ask = msgspec.structs.replace(job.ask, id=self._next_id())
        placement = msgspec.structs.replace(job.placement, decode=decode)
        job.flow.shielded = True
        try:
            await services.placer.reserve_decode(job.ask, placement)
            job.reserved = job.ask.id
        finally:
            job.flow.shielded = False
        job.placement = job.decision.placement = placement
        job.decision.attempts += 1
        return Attempt(services, job, placement)

    def _leave(self, failure: Failure) -> None:
        if failure.staged is not None:
            self._left.append(failure.staged)

    async def _free_left(self) -> None:
        """Let instances that have not failed take what was staged in vain: nothing else frees it soon."""
        job, services = self._job, self._services
        for staged in self._left:
            decode = services.placer.another_decode(staged.member.instance, self._excluded)
            if decode is None or job.placement is None:
                continue
            # Engines know the id of the last attempt already.
            job.ask = msgspec.structs.replace(job.ask, id=self._next_id())
            attempt = Attempt(services, job, msgspec.structs.replace(job.placement, decode=decode))
            attempt.owe(staged)
            await attempt.free()

    def _next_id(self) -> str:
        return f"{self._job.engine_id}-{self._job.decision.attempts}"

    def _say(self, answer: ErrorAnswer) -> None:
        job = self._job
        exchange = job.exchange
        job.decision.outcome = "refused" if answer.status == 429 else "failed"
        if not exchange.started:
            exchange.respond(answer.status, answer.body(), JSON, job.head + answer.header_lines())
        elif not exchange.ended:
            exchange.write(answer.event())
            exchange.end()

    def _release(self) -> None:
        reserved, self._job.reserved = self._job.reserved, None
        if reserved is None:
            return
        services, placement = self._services, self._job.placement
        services.ledger.release(reserved, services.clock.now_s())
        services.holding.look()
        if services.turns is not None and placement is not None and placement.prefill is not None:
            # It may have ended in its prefill: then others need not wait for it.
            services.turns.look(placement.prefill.id)


def _too_late() -> ErrorAnswer:
    return upstream_failed("the request took too long", "deadline", 504)
