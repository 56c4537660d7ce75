"""What is measured of each request: for metrics, for `explain`, and for the Conductor to learn from."""

from __future__ import annotations

import time

from mooncake_core.ledger import Ledger
from mooncake_core.slo import worst_gaps_mean
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import Computed, Sent, class_of
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.conductor.prediction import DecodeLoad, decode_now
from mooncake_scheduler.gateway.decisions import Decisions
from mooncake_scheduler.gateway.engines import PrefillAnswer
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.metrics import GatewayMetrics

LEAST_GAPS = 8
"""Tokens of a stream before its pace teaches the cost model."""


class Accounting:
    """Measures requests.

    Args:
        conductor: learns from what is measured.
        ledger: tells the load under which it was measured.
        clock: model seconds.
        metrics: counts.
        decisions: keeps the last ones.
    """

    def __init__(
        self,
        conductor: Conductor,
        ledger: Ledger,
        clock: Clock,
        metrics: GatewayMetrics,
        decisions: Decisions,
    ) -> None:
        self._conductor = conductor
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._decisions = decisions

    def prefill_sent(self, member: Member, placement: Placement, *, foreign: bool) -> Sent:
        """A leg that computes a prompt is sent.

        Args:
            member: the instance.
            placement: the request's; its reservation is in the ledger.
            foreign: the instance reports work that the ledger does not know of.
        """
        now_s, pace = time.monotonic(), member.pace
        if placement.queue_s == 0 and placement.prefill_s > 0:
            return pace.sent(now_s)
        # Busy, or nobody knows yet what its queue takes.
        # The ledger counts this request, and those of other schedulers, whose ends are not seen.
        load = self._ledger.load(member.instance.id, self._clock.now_s())
        handed_over = load.queued - len(load.waiting)
        return pace.sent(now_s, alone=not foreign and handed_over - 1 <= pace.under_way)

    def held(self, job: Job, seconds: float) -> None:
        """A prefill has waited so long for its turn, in wall seconds; whether it came or the client left."""
        held_s = seconds * self._clock.scale
        job.decision.held_s = (job.decision.held_s or 0.0) + held_s
        self._metrics.held_s.observe(held_s)

    def turn_came(self, job: Job, placement: Placement, queue_s: float) -> None:
        """A prefill is handed over behind so much work, in model seconds."""
        so_far_s = (time.monotonic() - job.received_s) * self._clock.scale
        job.predicted_ttft_s = so_far_s + queue_s + placement.transfer_s + placement.prefill_s

    def prefill_dropped(self, member: Member, sent: Sent) -> None:
        """Such a leg told nothing: it failed, was aborted, or shows no first token."""
        member.pace.dropped(sent, time.monotonic())

    def prefilled(
        self, job: Job, member: Member, placement: Placement, answer: PrefillAnswer, sent: Sent
    ) -> None:
        """A prefill leg has ended."""
        now_s = job.prefilled_s = time.monotonic()
        scale = self._clock.scale
        job.decision.prefill_s = (now_s - sent.at_s) * scale
        prompt = answer.prompt_tokens or job.ask.prompt_tokens
        job.cached_tokens = answer.cached_tokens
        cached = answer.cached_tokens or 0
        member.prompt_tokens += prompt
        member.cached_tokens += cached
        self._metrics.cached(prompt, cached)
        if not placement.fetch_tokens:
            self._computed(member, member.pace.ended(sent, prompt, cached, now_s))
            return
        # What is fetched arrives while others are computed: that it was its turn cannot be told.
        member.pace.dropped(sent, now_s)
        if sent.ahead == 0 and sent.turn >= 0 and member.inbound_flows == 0:
            self._conductor.observe_fetch(
                class_of(member.instance), prompt, cached, placement.fetch_tokens, (now_s - sent.at_s) * scale
            )

    def first_token(self, job: Job, member: Member, placement: Placement, sent: Sent) -> None:
        """The first token has come from an engine that does it all: its prompt is computed."""
        now_s = time.monotonic()
        if placement.fetch_tokens:
            member.pace.dropped(sent, now_s)
            return
        # What it found in its cache is told at the end, if at all; the index knew it.
        tokens = job.ask.prompt_tokens
        cached = min(placement.prefix_tokens, tokens - 1)
        self._computed(member, member.pace.ended(sent, tokens, cached, now_s))

    def _computed(self, member: Member, computed: Computed | None) -> None:
        if computed is not None:
            computed = computed._replace(seconds=computed.seconds * self._clock.scale)
            self._conductor.observe_prefill(class_of(member.instance), computed)

    def served_whole(self, job: Job, member: Member) -> None:
        """One engine has served a request from start to end."""
        usage = job.usage
        if usage is None or usage.cached_tokens is None:
            # A stream without usage, or an engine that does not tell: neither a hit nor a miss.
            return
        job.cached_tokens = usage.cached_tokens
        member.prompt_tokens += usage.prompt_tokens
        member.cached_tokens += usage.cached_tokens
        self._metrics.cached(usage.prompt_tokens, usage.cached_tokens)

    def begun(self, job: Job) -> None:
        """The first token of a stream has come; the ledger counts the request as decoding."""
        job.load_at_first = self._decoding(job)

    def finished(self, job: Job) -> None:
        """A request has ended, in whichever way; its reservation is not yet released."""
        decision, scale = job.decision, self._clock.scale
        now_s = time.monotonic()
        decision.total_s = (now_s - job.received_s) * scale
        decision.cached_tokens = job.cached_tokens
        if job.handed_over_s and job.first_s:
            decision.transfer_s = (job.first_s - job.handed_over_s) * scale
        decision.streamed = decision.ask is not None and job.wish.streams
        if decision.streamed and job.first_s:
            decision.ttft_s = (job.first_s - job.received_s) * scale
            tbt_s = worst_gaps_mean(job.gaps_s)
            decision.tbt_s = None if tbt_s is None else tbt_s * scale
        elif job.first_s and job.prefilled_s:
            # Of a whole answer nothing shows the first token but the leg that computed it.
            decision.ttft_s = (job.prefilled_s - job.received_s) * scale
        self._decisions.add(decision)
        if decision.outcome == "completed":
            self._learn_ttft(job)
            self._learn_hand_over(job)
            self._completed(job)
        self._metrics.finished(decision)

    def _completed(self, job: Job) -> None:
        # The end mark is an event too.
        output = max(0, job.events - 1)
        if job.usage is not None and job.usage.completion_tokens:
            output = job.usage.completion_tokens
        job.decision.output_tokens = output or None
        if output:
            self._conductor.observe_output(
                job.caller.tenant, job.ask.prompt_tokens, output, max_tokens=job.wish.max_tokens
            )
        if len(job.gaps_s) >= LEAST_GAPS and output > 1:
            self._learn_step(job, output)

    def _learn_ttft(self, job: Job) -> None:
        """Learn how far off the prediction was by which the request was admitted."""
        decision, placement = job.decision, job.placement
        # Of another attempt it is not the prediction that was at fault.
        if placement is None or decision.ttft_s is None or decision.world is None or decision.attempts != 1:
            return
        self._conductor.observe_ttft(
            class_of(placement.prefill or placement.decode),
            # What comes later may overtake it until its turn has come, but not beyond its promise.
            placement.ttft_s if job.predicted_ttft_s is None else job.predicted_ttft_s,
            # How long it waited for a place is no fault of prefill's; a whole answer's ends before that.
            decision.ttft_s - (decision.decode_wait_s or 0.0 if decision.streamed else 0.0),
            decision.world.slo.ttft_s,
        )

    def _learn_hand_over(self, job: Job) -> None:
        placement, seconds = job.placement, job.decision.transfer_s
        if placement is not None and placement.prefill is not None and seconds is not None:
            self._conductor.observe_hand_over(
                class_of(placement.prefill), job.ask.prompt_tokens, seconds - placement.tbt_s
            )

    def _learn_step(self, job: Job, output: int) -> None:
        """Learn the pace of a stream from what decoded beside it, as seen at its first token and at its end.

        Of this request itself the KV is known: on average its prompt and half of its answer. The others count
        with what they are predicted to grow to.
        """
        at_first, at_end = job.load_at_first, self._decoding(job)
        if at_first is None or at_end is None or job.placement is None:
            return
        ask = job.ask
        others = (at_first.kv_tokens + at_end.kv_tokens) / 2 - ask.prompt_tokens - ask.output_tokens
        self._conductor.observe_step(
            class_of(job.placement.decode),
            max(1.0, (at_first.batch + at_end.batch) / 2),
            max(0.0, others) + ask.prompt_tokens + output / 2,
            (job.last_s - job.first_s) / (output - 1) * self._clock.scale,
        )

    def _decoding(self, job: Job) -> DecodeLoad | None:
        """What the request's decode instance decodes now, this request included."""
        if job.placement is None:
            return None
        return decode_now(self._ledger.load(job.placement.decode.id, self._clock.now_s()))
