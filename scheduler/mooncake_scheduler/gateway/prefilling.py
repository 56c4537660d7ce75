"""The prefill leg of an attempt: its turn, its engine's id, the prompt computed and its KV staged."""

from __future__ import annotations

import time

import structlog

from mooncake_core.index import Tier
from mooncake_core.ledger import Waiting
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.conductor.rebinding import Move
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.errors import ErrorAnswer
from mooncake_scheduler.gateway.flow import Interruption
from mooncake_scheduler.gateway.http1.heads import header
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.legs import Leg
from mooncake_scheduler.gateway.lifecycle import Phase, Setback
from mooncake_scheduler.gateway.rebinding import Binding
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.sending import Failure, Sending, Staged
from mooncake_scheduler.gateway.services import Services

_log = structlog.get_logger(__name__)


class Prefilling(Sending):
    """Waits for the turn of a prefill, and carries it out.

    Args:
        services: the parts of the gateway.
        job: the request.
        placement: where it goes.
    """

    def __init__(self, services: Services, job: Job, placement: Placement) -> None:
        super().__init__(services, job, placement)
        self._refused: ErrorAnswer | None = None
        """What decode says to it now that its prefill has ended (mode `none`)."""
        self._holds = False
        """Its prefill has ended, and it has to wait for a place to decode."""
        self._undecoded: Staged | None = None
        """KV that nobody will decode: its prefill instance holds it until somebody takes it."""

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
                moved = await self._moved(binding, turn)
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

    async def _moved(self, binding: Binding, move: Move) -> tuple[Member, Waiting] | None:
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

    # -- the leg

    async def _prefill(self, member: Member) -> Staged | Failure:
        """Compute the prompt.

        Raises:
            Interruption: it may come when the KV is staged: then it is to be freed (`_undecoded`).
        """
        job, services = self._job, self._services
        instance = member.instance
        mooncake = instance.connector == "MooncakeConnector"
        job.enter(Phase.PREFILLING)
        rank = 0
        headers = self._headers()
        if mooncake:
            asked = await self._engine_id(member)
            if isinstance(asked, Failure):
                return asked
            rank = asked.number
            if rank:
                headers += header(b"x-data-parallel-rank", b"%d" % rank)
        transfer_id = f"xfer-{job.ask.id}"
        body = engines.prefill_body(job.wish.body, instance.connector, transfer_id, job.put)
        leg = Leg(job.flow)
        self._count_fetch(member, instance.store, 1)
        await self._believe(instance, self._placement.ttft_s)
        self._computes(member)
        try:
            setback = await self._gather(leg, member, headers, body, services.config.prefill_timeout_s)
        finally:
            self._count_fetch(member, instance.store, -1)
        if setback is not None:
            return self._failed(member, leg, setback)
        try:
            answer = engines.read_prefill_answer(leg.answer)
        except ValueError:
            return self._failed(member, leg, Setback.SERVER_ERROR)
        services.accounting.prefilled(job, member, self._placement, answer, self._computed()[1])
        services.roster.served(member)
        staged = Staged(member, transfer_id, rank, "", answer)
        if mooncake:
            # It may have restarted before this leg reached it: its id is then another one.
            job.limit(services.config.dispatch_timeout_s)
            try:
                asked = await self._engine_id(member, rank)
            except Interruption:
                self._undecoded = staged if answer.by_length else None
                raise
            if isinstance(asked, Failure):
                return asked
            staged = staged.known(asked.engine_id)
        self._refused = self._refusal()
        self._holds = answer.by_length and self._asks_for_a_place()
        services.ledger.prefill_finished(job.ask.id, services.clock.now_s(), held=self._holds)
        job.prefill_done = not self._holds
        if services.turns is not None:
            services.turns.look(instance.id)
        if instance.store:
            await services.residency.holds(instance.store, job.keys, Tier.DRAM)
        return staged

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

    async def _engine_id(self, member: Member, rank: int | None = None) -> engines.Rank | Failure:
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
            return ranks[member.requests % len(ranks)]
        return next((each for each in ranks if each.number == rank), ranks[0])
