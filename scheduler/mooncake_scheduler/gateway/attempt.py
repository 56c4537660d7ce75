"""Carrying out one placement: the prefill leg, the hand-over and the decode leg, or one leg for all.

Sequential also over Mooncake, where both legs might overlap: a decode that waits for a prefill which died
hangs for minutes (ADR 0013).
"""

from __future__ import annotations

import time
from math import inf

import msgspec
import structlog

from mooncake_core.index import Tier
from mooncake_core.ledger import RefusalReason, Waiting
from mooncake_scheduler.conductor.cost import Sent
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.conductor.rebinding import Move
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.answers import usage_of, with_cached_tokens, without_kv_params
from mooncake_scheduler.gateway.errors import ErrorAnswer
from mooncake_scheduler.gateway.flow import ClientLeftError, DeadlineError, StagedLostError
from mooncake_scheduler.gateway.http1.heads import JSON, header
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.legs import Leg, StreamLeg
from mooncake_scheduler.gateway.lifecycle import Phase, Setback
from mooncake_scheduler.gateway.rebinding import Binding
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.sending import Failure, Sending, Staged
from mooncake_scheduler.gateway.services import Services

_log = structlog.get_logger(__name__)

RELEASE_GRACE_S = 2.0
"""Wall seconds a decode whose client left is given to take the staged KV, when nothing tells that it has."""
UNTOLD_S = 10.0
"""Wall seconds for which a whole answer may still wait for its staged KV, which nothing tells: longer than it
takes to notice that an instance died, and short enough not to throw long decodes away."""


class Attempt(Sending):
    """One try at serving a job with the instances of one placement.

    Args:
        services: the parts of the gateway.
        job: the request.
        placement: where it goes; its reservation is held by the job.
    """

    def __init__(self, services: Services, job: Job, placement: Placement) -> None:
        super().__init__(services, job, placement)
        self._source: Member | None = None
        self._refused: ErrorAnswer | None = None
        self._computing: tuple[Member, Sent] | None = None
        """Where the prompt is being computed, and since when."""
        self._holds = False
        """Its prefill has ended, and it has to wait for a place to decode."""
        self.unwanted: Staged | None = None
        """KV that nobody will decode: its prefill instance holds it until somebody takes it (`discard`)."""

    async def carry_out(self) -> Failure | None:
        """Serve the job; None when its answer has ended.

        Raises:
            ClientLeftError: the client left; the engines were told.
            ErrorAnswer: 429, decode has no room (at once in mode `none`, else when the time to wait for it is
                over). `unwanted` may be set.
            DeadlineError: the request's own deadline has passed. `unwanted` may be set.
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
            if self._holds:
                place = await self._seat(staged)
                if isinstance(place, Failure):
                    return place
                decode = place
            return await self.decode(decode, staged)
        finally:
            self.abort()

    async def _seat(self, staged: Staged) -> Member | Failure:
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
            place = await services.holding.seat(job, held, anyway=job.decision.attempts > 1)
        except StagedLostError:
            services.engine_ids.forget(staged.member.instance.id)
            return Failure(staged.member, Setback.BROKEN, job.phase)
        except ClientLeftError:
            staged.member.awaited.pop(job.flow, None)
            await self.discard(staged)
            raise
        except DeadlineError:
            self.unwanted = staged
            raise
        finally:
            staged.member.awaited.pop(job.flow, None)
            job.decision.decode_wait_s = services.clock.now_s() - now_s
        if isinstance(place, RefusalReason):
            services.metrics.wasted_prefill()
            self.unwanted = staged
            waited_s = services.clock.now_s() - arrived_s
            raise services.placer.no_place(place, job.ask, placement, world, waited_s)
        job.prefill_done = True
        self._placement = job.placement = job.decision.placement = msgspec.structs.replace(
            placement, decode=place
        )
        member = services.roster.members.get(place.id)
        return Failure(None, Setback.GONE, job.phase) if member is None else member

    async def decode(self, member: Member, staged: Staged) -> Failure | None:
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
        finally:
            self._staged_taken()
        if failure is None:
            return None
        services.engine_ids.forget(prefill.id)
        return failure._replace(staged=staged)

    def _staged_taken(self) -> None:
        """Decode no longer depends on the instance where its KV was staged."""
        source, self._source = self._source, None
        if source is not None:
            source.awaited.pop(self._job.flow, None)

    def abort(self) -> None:
        super().abort()
        if self._computing is not None:
            self._services.accounting.prefill_dropped(*self._computed())

    async def discard(self, staged: Staged) -> None:
        """Let a decode instance take KV that nobody wants: nothing else frees it at the prefill instance.

        Decode is sent for one token and its answer is dropped (routers.md §4, entry 1).
        """
        job, services = self._job, self._services
        job.outlive_client()
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
        try:
            await self._gather(leg, member, self._headers(), body, services.config.first_token_timeout_s)
        finally:
            self.abort()

    def _check_decode(self, staged: Staged) -> None:
        """Mode `none`: decode looks for itself when the prefill has ended; told so by `_prefill`."""
        refused, self._refused = self._refused, None
        if refused is None:
            return
        self._services.metrics.wasted_prefill()
        if staged.answer.by_length:
            self.unwanted = staged
        raise refused

    # -- its turn

    async def _turn(self, member: Member) -> Member | Failure:
        """Wait until the prefill is to be handed to its instance; most often that is now.

        Returns:
            That instance: where it waited, it may be another one by then.
        """
        job, services = self._job, self._services
        turns = services.turns
        waiting = None if turns is None else services.ledger.waiting(job.ask.id)
        if turns is None or waiting is None:
            return member
        job.limit(services.config.prefill_timeout_s)
        # Of another attempt it is not known here which instances failed it.
        movable = services.late_binding is not None and job.decision.attempts == 1
        binding = Binding(job.ask, self._placement, job.depths) if movable else None
        began_s = time.monotonic()
        try:
            turn = await turns.wait(job.flow, member, job.ask.id, waiting, binding)
            while isinstance(turn, Move):
                assert binding is not None
                moved = await self._moved(member, binding, turn)
                if moved is None:
                    return Failure(None, Setback.GONE, job.phase)
                member, waiting = moved
                turn = await turns.wait(job.flow, member, job.ask.id, waiting, binding)
        finally:
            services.accounting.held(job, time.monotonic() - began_s)
        if turn is None:
            return Failure(member, Setback.GONE, job.phase)
        services.accounting.turn_came(job, self._placement, turn)
        job.limit(services.config.dispatch_timeout_s)
        return member

    async def _moved(self, member: Member, binding: Binding, move: Move) -> tuple[Member, Waiting] | None:
        """Where it waits after another instance was offered; None where that one has left meanwhile."""
        job, services = self._job, self._services
        late_binding = services.late_binding
        assert late_binding is not None
        # One whose move nobody sees would be released where it is not any more.
        job.flow.shielded = True
        try:
            moved = await late_binding.take(binding, move, time.monotonic())
        finally:
            job.flow.shielded = False
        if moved:
            job.decision.moves = binding.moves
            self._placement = job.placement = job.decision.placement = binding.placement
            services.metrics.moved()
        job.flow.check()
        prefill = self._placement.prefill
        waiting = services.ledger.waiting(job.ask.id)
        assert prefill is not None
        assert waiting is not None
        there = services.roster.members.get(prefill.id)
        return None if there is None else (there, waiting)

    def _needs_no_turn(self) -> None:
        """It is served without the prefill instance, where others would wait for its turn to pass."""
        if self._services.turns is not None:
            self._services.ledger.prefill_begun(self._job.ask.id, self._services.clock.now_s())

    # -- prefill

    async def _prefill(self, member: Member) -> Staged | Failure:
        job, services = self._job, self._services
        instance = member.instance
        mooncake = instance.connector == "MooncakeConnector"
        job.enter(Phase.PREFILLING)
        rank, engine_id = 0, ""
        headers = self._headers()
        if mooncake:
            asked = await self._engine_id(member)
            if isinstance(asked, Failure):
                return asked
            rank, engine_id = asked
            if rank:
                headers += header(b"x-data-parallel-rank", b"%d" % rank)
        transfer_id = f"xfer-{job.ask.id}"
        body = engines.prefill_body(job.wish.body, instance.connector, transfer_id, job.put)
        leg = Leg(job.flow)
        self._count_fetch(instance, 1)
        await self._believe(instance, self._placement.ttft_s)
        self._computes(member)
        try:
            setback = await self._gather(leg, member, headers, body, services.config.prefill_timeout_s)
        finally:
            self._count_fetch(instance, -1)
        if setback is not None:
            return self._failed(member, leg, setback)
        try:
            answer = engines.read_prefill_answer(leg.answer)
        except ValueError:
            return self._failed(member, leg, Setback.SERVER_ERROR)
        services.accounting.prefilled(job, member, self._placement, answer, self._computed()[1])
        services.roster.served(member)
        if mooncake:
            # It may have restarted before this leg reached it: its id is then another one.
            try:
                asked = await self._engine_id(member, rank)
            except ClientLeftError:
                await self._discard_left(member, transfer_id, rank, answer)
                raise
            if isinstance(asked, Failure):
                return asked
            engine_id = asked[1]
        self._refused = self._refusal()
        self._holds = answer.by_length and self._asks_for_a_place()
        services.ledger.prefill_finished(job.ask.id, services.clock.now_s(), held=self._holds)
        job.prefill_done = not self._holds
        if services.turns is not None:
            services.turns.look(instance.id)
        if instance.store:
            await services.residency.holds(instance.store, job.keys, Tier.DRAM)
        return Staged(member, transfer_id, engine_id, answer)

    async def _discard_left(
        self, member: Member, transfer_id: str, rank: int, answer: engines.PrefillAnswer
    ) -> None:
        """The client left between the legs: the KV is staged, and its engine's id is not known yet."""
        if not answer.by_length:
            return
        try:
            asked = await self._engine_id(member, rank)
            if not isinstance(asked, Failure):
                await self.discard(Staged(member, transfer_id, asked[1], answer))
        except DeadlineError:
            return

    def _refusal(self) -> ErrorAnswer | None:
        """What decode says to a request that is about to reach it, where it has to look for itself."""
        job, placer = self._job, self._services.placer
        world = job.decision.world
        if world is None or job.decision.attempts > 1 or not placer.conductor.checks_stages:
            return None
        return placer.check_decode(job.ask, self._placement, world)

    def _asks_for_a_place(self) -> bool:
        job, services = self._job, self._services
        world = job.decision.world
        if world is None or not services.placer.conductor.holds:
            return False
        return services.holding.needed(job.ask, self._placement.decode, world.slo)

    async def _engine_id(self, member: Member, rank: int | None = None) -> tuple[int, str] | Failure:
        """A rank of a prefill engine, with its engine id as of now."""
        services = self._services
        generation = member.upstream.generation
        ranks = services.engine_ids.known(member.instance, generation)
        if ranks is None:
            try:
                ranks = await services.engine_ids.asking(member.instance, generation)
            except ConnectionError as error:
                _log.warning("no engine id", instance=member.instance.id, error=str(error))
                services.roster.faulted(member)
                services.roster.missed(member)
                return Failure(member, Setback.CONNECT, Phase.PREFILLING)
        if rank is None:
            chosen = ranks[member.requests % len(ranks)]
        else:
            chosen = next((each for each in ranks if each.number == rank), ranks[0])
        return chosen.number, chosen.engine_id

    # -- the leg whose answer is the client's

    async def _whole(self, member: Member) -> Failure | None:
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
                job.limit(self._services.config.stall_timeout_s)
            await leg.finished()
            setback = leg.setback
            if setback is None and not (leg.begun and leg.stream.ended):
                setback = Setback.BROKEN
        except DeadlineError:
            leg.abort()
            if leg.begun and job.exchange.paused:
                # The engine went on; it is the client that does not read.
                job.exchange.connection.abort()
                raise ClientLeftError from None
            setback = Setback.DEADLINE
        finally:
            job.last_s = leg.last_s
            job.events = leg.stream.events
        if setback is not None:
            return self._failed(member, leg, setback)
        job.usage = leg.stream.last_usage()
        self._served(member)
        job.exchange.end()
        return None

    async def _let_staged_go(self, leg: Leg) -> None:
        """Let a decode whose client left take the staged KV, which frees it at the prefill instance.

        A stream tells when that has happened: with its first token. For whole answers a grace has to do.
        """
        streams = isinstance(leg, StreamLeg)
        self._job.outlive_client()
        self._job.limit(self._services.config.first_token_timeout_s if streams else RELEASE_GRACE_S)
        try:
            await (leg.first() if isinstance(leg, StreamLeg) else leg.finished())
        except DeadlineError:
            return

    def _computes(self, member: Member) -> None:
        """The prompt is sent to be computed; told how it ended by `_computed`, or by `abort`."""
        services, placement = self._services, self._placement
        foreign = member.instance.id in services.placer.reported.foreign
        self._computing = member, services.accounting.prefill_sent(member, placement, foreign=foreign)

    def _computed(self) -> tuple[Member, Sent]:
        computing, self._computing = self._computing, None
        assert computing is not None
        return computing

    # -- what happened

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

    def _served(self, member: Member) -> None:
        self._services.roster.served(member)
        self._job.decision.outcome = "completed"
