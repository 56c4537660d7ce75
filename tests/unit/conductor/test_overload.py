"""Admission on a decode-bound cluster with the real ledger: a check of sanity, no simulator.

Eight prefill instances feed one decode instance whose targets bind. Decode checks for itself when a prefill
has ended (`Conductor.check_stage`, the papers' baseline), so that a prefill admitted in vain shows as wasted.
"""

import heapq
import random
from collections import Counter

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, MemoryLedger
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import Ask, InstanceView, Refused, Slo, Stage, World
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import instance

MODEL = CostModel.from_profile(LLAMA3_70B_A800)
COSTS = CostModels(default=MODEL)
SLO = Slo(ttft_s=30, tbt_s=0.06)
CAPACITY_TOKENS = 1_400_000
ARRIVE, PREFILLED, DECODED = range(3)


def requests(seed, count=900, rate=4.0):
    """(time, prompt tokens, output tokens), Poisson, of log-normal lengths."""
    chance = random.Random(seed)
    now_s = 0.0
    for _ in range(count):
        now_s += chance.expovariate(rate)
        prompt = min(120_000, int(chance.lognormvariate(8.8, 1.1)) + 64)
        yield now_s, prompt, max(1, int(3 * chance.lognormvariate(5.3, 0.9)))


class Decode:
    """One decode instance: all requests of its batch get a token a step."""

    def __init__(self):
        self.batch = {}
        self.since_s = 0.0
        self.version = 0

    def step_s(self):
        return MODEL.step_s(len(self.batch), sum(kv for _, kv in self.batch.values()))

    def advance(self, now_s):
        if self.batch:
            steps = (now_s - self.since_s) / self.step_s()
            self.batch = {key: (left - steps, kv) for key, (left, kv) in self.batch.items()}
        self.since_s = now_s

    def next_end(self):
        self.version += 1
        key = min(self.batch, key=lambda each: self.batch[each][0])
        return self.since_s + max(0.0, self.batch[key][0]) * self.step_s(), key


async def outcomes(mode, seed):
    """How many requests were refused, wasted (prefilled in vain) and completed, and what is still held."""
    arrivals = list(requests(seed))
    conductor = Conductor(create("kv-centric"), Admission(AdmissionMode(mode)), COSTS, random.Random(seed))
    ledger = MemoryLedger()
    prefills = {f"p{i}": instance(f"p{i}", Role.PREFILL) for i in range(8)}
    free_s = dict.fromkeys(prefills, 0.0)
    decode_instance = instance("d0", Role.DECODE, kv_capacity_tokens=CAPACITY_TOKENS)
    decode = Decode()
    events = [(at_s, ARRIVE, key, 0) for key, (at_s, _, _) in enumerate(arrivals)]
    heapq.heapify(events)
    counts = Counter()
    placed = {}

    def plan_next_end():
        if decode.batch:
            at_s, key = decode.next_end()
            heapq.heappush(events, (at_s, DECODED, key, decode.version))

    async def arrive(now_s, key):
        _, prompt, _ = arrivals[key]
        loads = ledger.loads(now_s)
        ask = Ask(str(key), prompt, conductor.expected_output_tokens("t", prompt))
        world = World(
            now_s,
            [InstanceView(each, loads.get(name, InstanceLoad())) for name, each in prefills.items()],
            [InstanceView(decode_instance, loads.get("d0", InstanceLoad()))],
            COSTS,
            SLO,
        )
        answer = conductor.decide(ask, world)
        if isinstance(answer, Refused):
            counts["refused"] += 1
            return
        if conductor.checks_stages and conductor.check_stage(Stage.PREFILL, ask, answer, world):
            counts["turned away"] += 1
            return
        placed[key] = ask, answer
        reservation = conductor.reservation(ask, answer, now_s)
        reason = await ledger.reserve(reservation, conductor.limits(ask, answer, world), now_s)
        assert reason is None, "what was admitted has to be let through when nobody was quicker"
        name = answer.prefill.id
        free_s[name] = max(now_s, free_s[name]) + MODEL.prefill_s(prompt, 0)
        heapq.heappush(events, (free_s[name], PREFILLED, key, 0))

    def prefilled(now_s, key):
        _, prompt, output = arrivals[key]
        decode.advance(now_s)
        # The request itself is still on its way: what decodes does not include it.
        there = World(now_s, [], [InstanceView(decode_instance, ledger.load("d0", now_s))], COSTS, SLO)
        if conductor.check_stage(Stage.DECODE, *placed.pop(key), there) is None:
            ledger.prefill_finished(str(key), now_s)
            decode.batch[key] = (float(output), prompt + output)
        else:
            counts["wasted"] += 1
            ledger.release(str(key), now_s)
        plan_next_end()

    def decoded(now_s, key):
        decode.advance(now_s)
        del decode.batch[key]
        counts["completed"] += 1
        ledger.release(str(key), now_s)
        conductor.observe_output("t", *arrivals[key][1:])
        plan_next_end()

    now_s = 0.0
    while events:
        now_s, kind, key, version = heapq.heappop(events)
        if kind == ARRIVE:
            await arrive(now_s, key)
        elif kind == PREFILLED:
            prefilled(now_s, key)
        elif version == decode.version:
            decoded(now_s, key)
    counts["left"] = sum(load.batch + load.arriving + load.queued for load in ledger.loads(now_s).values())
    return counts


@pytest.mark.parametrize("seed", [1, 2])
async def test_predictive_admission_wastes_fewer_prefills_and_completes_at_least_as_many(seed):
    none, early, predictive = [await outcomes(mode, seed) for mode in ("none", "early", "predictive")]
    assert none["refused"] == 0
    assert predictive["wasted"] < early["wasted"] <= none["wasted"]
    assert predictive["completed"] >= none["completed"]
    for counts in (none, early, predictive):
        assert counts["refused"] + counts["turned away"] + counts["wasted"] + counts["completed"] == 900
        assert counts["left"] == 0
