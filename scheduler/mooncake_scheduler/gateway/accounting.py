"""What is measured of each request: for metrics, for `explain`, and for the Conductor to learn from."""

from __future__ import annotations

import time

from mooncake_core.ledger import Ledger
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import class_of
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.gateway.decisions import Decisions
from mooncake_scheduler.gateway.engines import PrefillAnswer
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.metrics import GatewayMetrics

LEAST_GAPS = 8
"""Tokens of a stream before its pace teaches the cost model."""


def tbt_of(gaps_s: list[float]) -> float | None:
    """A request's TBT: the mean of its longest 10 % of gaps (FAST'25 §5.1); None without gaps."""
    if not gaps_s:
        return None
    most = max(1, len(gaps_s) // 10)
    longest = sorted(gaps_s)[-most:]
    return sum(longest) / most


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

    def prefilled(
        self, job: Job, member: Member, placement: Placement, answer: PrefillAnswer, wall_s: float
    ) -> None:
        """A prefill leg has ended, `wall_s` after it was sent."""
        seconds = wall_s * self._clock.scale
        job.decision.prefill_s = seconds
        prompt = answer.prompt_tokens or job.ask.prompt_tokens
        job.cached_tokens = answer.cached_tokens
        cached = answer.cached_tokens or 0
        member.prompt_tokens += prompt
        member.cached_tokens += cached
        self._metrics.cached(prompt, cached)
        if placement.queue_s == 0 and placement.fetch_tokens == 0:
            # Only then is the time of the leg the time of the prefill.
            self._conductor.observe_prefill(class_of(member.instance), prompt, cached, seconds)

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

    def finished(self, job: Job) -> None:
        """A request has ended, in whichever way; its reservation is not yet released."""
        decision, scale = job.decision, self._clock.scale
        now_s = time.monotonic()
        decision.total_s = (now_s - job.received_s) * scale
        decision.cached_tokens = job.cached_tokens
        streamed = job.wish.streams if decision.ask is not None else False
        tbt_s = None
        if job.first_s and streamed:
            decision.ttft_s = (job.first_s - job.received_s) * scale
            tbt_s = tbt_of(job.gaps_s)
            if tbt_s is not None:
                tbt_s *= scale
            decision.tbt_s = tbt_s
        self._decisions.add(decision)
        if decision.outcome == "completed":
            self._completed(job)
        self._metrics.finished(decision)

    def _completed(self, job: Job) -> None:
        output = job.events
        if job.usage is not None and job.usage.completion_tokens:
            output = job.usage.completion_tokens
        job.decision.output_tokens = output or None
        if output:
            self._conductor.observe_output(
                job.caller.tenant, job.ask.prompt_tokens, output, max_tokens=job.wish.max_tokens
            )
        if len(job.gaps_s) >= LEAST_GAPS and job.placement is not None:
            instance = job.placement.decode
            load = self._ledger.loads(self._clock.now_s()).get(instance.id)
            if load is not None:
                step_s = (job.last_s - job.first_s) / max(1, output - 1) * self._clock.scale
                self._conductor.observe_step(class_of(instance), max(1, load.batch), load.kv_tokens, step_s)
