"""Sending one leg of an attempt, and telling what came of it to those who keep count."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import structlog

from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.cost import Sent
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.flow import DeadlineError
from mooncake_scheduler.gateway.http1.heads import header
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.legs import Leg, StreamLeg
from mooncake_scheduler.gateway.lifecycle import Phase, Setback
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.services import Services

_log = structlog.get_logger(__name__)

OVERRUN = 20.0
"""A whole answer may take so many times its predicted decode before its engine counts as hanging."""
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Staged(msgspec.Struct, frozen=True):
    """KV that waits at a prefill instance."""

    member: Member
    transfer_id: str
    rank: int
    """Of the engine; 0 where there is but one."""
    engine_id: str
    """Empty where it is not known yet, and where the connector needs none."""
    answer: engines.PrefillAnswer

    def known(self, engine_id: str) -> Staged:
        """The same, with its engine's id."""
        return msgspec.structs.replace(self, engine_id=engine_id)


class Failure(NamedTuple):
    """A leg that was not served."""

    member: Member | None
    """Whose it was; None = it is known no more."""
    setback: Setback
    phase: Phase
    staged: Staged | None = None
    status: int = 0
    answer: bytes = b""
    retry_after: bytes = b""


class Sending:
    """Sends the legs of one attempt, one at a time.

    Args:
        services: the parts of the gateway.
        job: the request.
        placement: where it goes.
    """

    def __init__(self, services: Services, job: Job, placement: Placement) -> None:
        self._services = services
        self._job = job
        self._placement = placement
        self._leg: Leg | None = None
        self._computing: tuple[Member, Sent] | None = None
        """Where the prompt is being computed, and since when."""

    def abort(self) -> None:
        """End the leg under way, if any; its engine notices that the connection closes."""
        leg, self._leg = self._leg, None
        if leg is not None and not leg.done:
            leg.abort()
        if self._computing is not None:
            self._services.accounting.prefill_dropped(*self._computed())

    async def _gather(
        self, leg: Leg, member: Member, headers: bytes, body: bytes, limit_s: float
    ) -> Setback | None:
        """Send a leg and wait for its whole answer; None when it was served.

        Raises:
            DeadlineError: the request's own deadline has passed, which is no engine's fault; the leg goes on.
        """
        try:
            self._dispatch(leg, member, headers, body, limit_s)
            await leg.finished()
        except DeadlineError:
            if self._job.overdue:
                raise
            leg.abort()
            return Setback.DEADLINE
        return leg.setback

    def _dispatch(self, leg: Leg, member: Member, headers: bytes, body: bytes, limit_s: float) -> None:
        self._job.limit(limit_s)
        self._leg = leg
        self._services.roster.sent(member)
        leg.call = member.upstream.request(b"POST", self._job.exchange.path, headers, body, leg)

    def _headers(self) -> bytes:
        lines = b"x-request-id: %b\r\n" % self._job.ask.id.encode()
        sent = self._job.exchange.headers
        for name in _TRACE_HEADERS:
            if name in sent:
                lines += header(name, sent[name])
        return lines

    def _answer_limit_s(self, first_s: float) -> float:
        """How long a whole answer may take: nothing tells when its first token came."""
        services, placement, most = self._services, self._placement, self._job.wish.max_tokens
        if most is None or placement.tbt_s <= 0:
            return services.config.request_timeout_s
        return first_s + OVERRUN * most * placement.tbt_s / services.clock.scale

    def _failed(self, member: Member, leg: Leg, setback: Setback) -> Failure:
        services = self._services
        if setback.is_fault:
            services.roster.faulted(member)
            services.engine_ids.forget(member.instance.id)
        if setback is Setback.CONNECT:
            services.roster.missed(member)
        status = leg.error_status if isinstance(leg, StreamLeg) and leg.error_status else leg.status
        _log.warning(
            "a leg failed", request_id=self._job.request_id, instance=member.instance.id,
            setback=setback.value, status=status, detail=leg.fault.detail if leg.fault else "",
        )  # fmt: skip
        return Failure(member, setback, self._job.phase, None, status, leg.answer, leg.retry_after)

    async def _believe(self, instance: Instance, within_s: float) -> None:
        """The instance will hold the prompt's blocks, `within_s` model seconds from now."""
        job, services = self._job, self._services
        known = job.depths.get(instance.id)
        until_s = time.monotonic() + within_s / services.clock.scale
        await services.residency.dispatched(instance.id, job.keys, 0 if known is None else known.hbm, until_s)

    def _computes(self, member: Member) -> None:
        """The prompt is sent to be computed; told how it ended by `_computed`, or by `abort`."""
        services, placement = self._services, self._placement
        foreign = member.instance.id in services.placer.worlds.reported.foreign
        self._computing = member, services.accounting.prefill_sent(member, placement, foreign=foreign)

    def _computed(self) -> tuple[Member, Sent]:
        computing, self._computing = self._computing, None
        assert computing is not None
        return computing

    def _count_fetch(self, member: Member, store: str, change: int) -> None:
        """Count a prefix that a store is sending to an instance."""
        if not self._placement.fetch_tokens or not store:
            return
        flows = self._services.roster.source_flows
        flows[store] = flows.get(store, 0) + change
        member.inbound_flows += change
