"""What streams teach the Conductor: the pace of the batch they really ran in."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import Limits, MemoryLedger
from mooncake_core.registry import Instance, Role
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels, class_of
from mooncake_scheduler.conductor.model import Ask, Placement, Slo, World
from mooncake_scheduler.gateway.accounting import Accounting
from mooncake_scheduler.gateway.answers import Usage
from mooncake_scheduler.gateway.auth import Caller
from mooncake_scheduler.gateway.body import Body
from mooncake_scheduler.gateway.decisions import Decision, Decisions
from mooncake_scheduler.gateway.errors import plain_error_body
from mooncake_scheduler.gateway.http1 import Exchange, HttpServer, ServerLimits
from mooncake_scheduler.gateway.http1.connection import ServerConnection
from mooncake_scheduler.gateway.job import Job, Wish
from mooncake_scheduler.metrics import GatewayMetrics
from mooncake_scheduler.policies import create

ENGINE = CostModel(t0_s=0.020, t1_s_per_request=0.004, t2_s_per_token=1e-6)
"""What the engine is really like."""
DECODE = Instance(id="d0", role=Role.DECODE, url="http://d0", pool="decode")
OUTPUT = 40


class Fleet:
    """One decode instance, its ledger, and whoever learns from it."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self.clock = Clock(1.0)
        self.metrics = GatewayMetrics(1.0, 0.1)
        self.conductor = Conductor(
            create("kv-centric"), Admission(AdmissionMode.NONE), CostModels(), random.Random(0)
        )
        self.accounting = Accounting(self.conductor, self.ledger, self.clock, self.metrics, Decisions())
        server = HttpServer(cast("Any", None), ServerLimits(), plain_error_body)
        self._exchange = Exchange(ServerConnection(server))
        self._made = 0

    def learned(self) -> CostModel:
        return self.conductor.costs.of_class(class_of(DECODE))

    async def job(self, prompt_tokens: int, expected: int = OUTPUT, *, streams: bool = True) -> Job:
        """A request that holds its reservation and decodes."""
        self._made += 1
        ask = Ask(f"r{self._made}", prompt_tokens, expected)
        placement = Placement(None, DECODE, 0, 0, 0.0, 0.0, 0.5, 0.5, 0.05)
        now_s = self.clock.now_s()
        await self.ledger.reserve(self.conductor.reservation(ask, placement, now_s), Limits(), now_s)
        self.ledger.prefill_finished(ask.id, now_s)
        decision = Decision(ask.id, now_s, "default", "/v1/completions", ask=ask, placement=placement)
        job = Job(self._exchange, Caller(), ask.id, ask.id, b"", decision, 1e12)
        job.ask, job.placement, job.reserved = ask, placement, ask.id
        job.wish = Wish(Body(b"{}"), "m", streams, None, None, False)
        return job

    def answered(self, job: Job, step_s: float) -> None:
        """Its answer has ended, a token every `step_s`; its reservation is still held."""
        job.first_s = job.received_s + 0.5
        job.last_s = job.first_s + step_s * (OUTPUT - 1)
        job.gaps_s = [step_s] * (OUTPUT - 1)
        job.usage = Usage(job.ask.prompt_tokens, OUTPUT)
        job.decision.outcome = "completed"
        self.accounting.finished(job)

    async def serve(self, sizes: list[int]) -> None:
        """Serve requests side by side: all are in the batch from the first token to the end."""
        jobs = [await self.job(size) for size in sizes]
        step_s = ENGINE.step_s(len(jobs), int(sum(size + OUTPUT / 2 for size in sizes)))
        for job in jobs:
            self.accounting.begun(job)
        for job in jobs:
            self.answered(job, step_s)
        for job in jobs:
            self.ledger.release(job.ask.id, self.clock.now_s())


async def test_a_cold_model_warms_up_from_streams_that_are_each_alone() -> None:
    fleet = Fleet()
    assert not fleet.learned().knows_decode
    for number in range(20):
        await fleet.serve([1_000 * (1 + number % 8)])
    learned = fleet.learned()
    assert learned.knows_decode
    assert learned.step_s(1, 4_000) == pytest.approx(ENGINE.step_s(1, 4_000), rel=0.02)


async def test_one_stream_then_two_then_four_tell_the_constants_apart() -> None:
    fleet = Fleet()
    for together in (1, 2, 4):
        for number in range(30):
            await fleet.serve([1_000 * (1 + (number + place) % 8) for place in range(together)])
    learned = fleet.learned()
    assert learned.t0_s == pytest.approx(ENGINE.t0_s, rel=0.1)
    assert learned.t1_s_per_request == pytest.approx(ENGINE.t1_s_per_request, rel=0.15)
    assert learned.step_s(8, 40_000) == pytest.approx(ENGINE.step_s(8, 40_000), rel=0.05)


async def test_those_who_are_promised_but_do_not_decode_yet_teach_nothing() -> None:
    fleet = Fleet()
    seen: list[tuple[float, float]] = []
    fleet.conductor._fitting.observe_step = lambda _, batch, kv, __: seen.append((batch, kv))  # type: ignore[method-assign]
    now_s = fleet.clock.now_s()
    on_its_way = fleet.conductor.reservation(
        Ask("later", 50_000, 500), Placement(None, DECODE, 0, 0, 0.0, 0.0, 9.0, 9.0, 0.05), now_s
    )
    await fleet.ledger.reserve(on_its_way, Limits(), now_s)
    job = await fleet.job(1_000, expected=900)
    fleet.accounting.begun(job)
    fleet.answered(job, 0.03)
    # Alone, with its prompt and half of the answer that really came.
    assert seen == [(1.0, 1_000 + OUTPUT / 2)]


async def test_a_batch_that_emptied_meanwhile_counts_by_its_mean() -> None:
    fleet = Fleet()
    seen: list[float] = []
    fleet.conductor._fitting.observe_step = lambda _, batch, kv, __: seen.append(batch)  # type: ignore[method-assign]
    other, job = await fleet.job(1_000), await fleet.job(1_000)
    fleet.accounting.begun(job)
    fleet.ledger.release(other.ask.id, fleet.clock.now_s())
    fleet.answered(job, 0.03)
    assert seen == [1.5]


# -- what counts as goodput


async def judged(fleet: Fleet, slo: Slo, *, streams: bool, ttft_s: float | None, tbt_s: float | None) -> None:
    job = await fleet.job(1_000, streams=streams)
    decision = job.decision
    decision.world = World(0.0, [], [], CostModels(), slo)
    decision.ttft_s, decision.tbt_s, decision.streamed, decision.outcome = ttft_s, tbt_s, streams, "completed"
    fleet.metrics.finished(decision)


async def test_targets_that_are_multiples_judge_each_request_by_its_own() -> None:
    fleet = Fleet()
    await judged(fleet, Slo(5.0, 0.5), streams=True, ttft_s=4.0, tbt_s=0.3)
    assert fleet.metrics.goodput == 1
    await judged(fleet, Slo(0.5, 0.5), streams=True, ttft_s=0.9, tbt_s=0.05)
    assert fleet.metrics.goodput == 1


async def test_a_whole_answer_is_judged_by_its_prefill_leg_or_not_at_all() -> None:
    fleet, slo = Fleet(), Slo(1.0, 0.1)
    await judged(fleet, slo, streams=False, ttft_s=None, tbt_s=None)
    assert (fleet.metrics.goodput, fleet.metrics.unjudged) == (0, 1)
    await judged(fleet, slo, streams=False, ttft_s=0.5, tbt_s=None)
    await judged(fleet, slo, streams=False, ttft_s=1.5, tbt_s=None)
    assert (fleet.metrics.goodput, fleet.metrics.unjudged) == (1, 1)
    await judged(fleet, Slo(None, 0.1), streams=False, ttft_s=0.5, tbt_s=None)
    assert fleet.metrics.unjudged == 2
    await judged(fleet, Slo(), streams=False, ttft_s=None, tbt_s=None)
    assert (fleet.metrics.goodput, fleet.metrics.unjudged) == (2, 2)
    # A stream of one token has no gaps that could be too long.
    await judged(fleet, slo, streams=True, ttft_s=0.5, tbt_s=None)
    assert fleet.metrics.goodput == 3


async def test_the_first_token_of_a_whole_answer_is_when_its_prefill_leg_ended() -> None:
    fleet = Fleet()
    job = await fleet.job(1_000, streams=False)
    job.prefilled_s = job.received_s + 0.7
    fleet.answered(job, 0.03)
    assert job.decision.ttft_s == pytest.approx(0.7)
    assert job.decision.tbt_s is None
    # Nobody saw it come: it is no measurement of TTFT.
    assert sum(fleet.metrics.ttft_s.counts) == 0
