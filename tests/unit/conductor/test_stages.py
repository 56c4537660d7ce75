"""Stages that check for themselves, places that were lost, and decode as it is explained."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, Limits, MemoryLedger, RefusalReason, Reservation
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.model import Placement, Stage
from mooncake_scheduler.conductor.prediction import decode_now, without_arriving
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import ask, decode, prefill, world

# 20 ms + 1 ms a request + 1 µs a KV token: 30 requests of 1 000 tokens make steps of 80 ms.
BUSY = InstanceLoad(batch=30, kv_tokens=30_000, decode_ends=((50, 30, 30_000),))


def conductor(mode="none"):
    return Conductor(create("algorithm-1"), Admission(AdmissionMode(mode)), CostModels(), random.Random(0))


def placed(scene):
    return conductor().decide(ask(), scene)


def check(stage, scene, mode="none"):
    found = placed(scene)
    assert isinstance(found, Placement), "mode none refuses nothing at arrival"
    return conductor(mode).check_stage(stage, ask(), found, scene)


def test_only_mode_none_needs_its_stages_checked():
    assert conductor("none").checks_stages
    assert not conductor("early").checks_stages
    assert not conductor("predictive").checks_stages


def test_prefill_refuses_at_its_start_what_would_miss_the_target():
    refused = check(Stage.PREFILL, world([prefill("a", queued_s=3.5)], ttft_s=4.0))
    assert refused.reason is RefusalReason.TTFT
    assert refused.retry_after_s == pytest.approx(0.5)
    assert check(Stage.PREFILL, world([prefill("a", queued_s=2.5)], ttft_s=4.0)) is None
    assert check(Stage.PREFILL, world([prefill("a", queued_s=900)])) is None


def test_decode_refuses_when_it_starts_for_its_pace_or_its_memory():
    pace = check(Stage.DECODE, world([prefill("a")], [decode("d", load=BUSY)], tbt_s=0.08))
    assert pace.reason is RefusalReason.TBT
    assert pace.retry_after_s > 0
    crowded = check(Stage.DECODE, world([prefill("a")], [decode("d", load=BUSY, max_batch=30)]))
    assert crowded.reason is RefusalReason.TBT
    full = check(Stage.DECODE, world([prefill("a")], [decode("d", load=BUSY, kv_capacity_tokens=31_000)]))
    assert full.reason is RefusalReason.KV_MEMORY
    assert check(Stage.DECODE, world([prefill("a")], [decode("d", load=BUSY)], tbt_s=0.2)) is None


def test_decode_looks_at_who_decodes_and_not_at_who_is_still_on_the_way():
    coming = InstanceLoad(arriving=30, kv_tokens=30_000, prefill_ends=((1, 30, 30_000),))
    scene = world([prefill("a")], [decode("d", load=coming, max_batch=30, kv_capacity_tokens=31_000)])
    assert check(Stage.DECODE, scene) is None


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_no_stage_refuses_on_an_idle_instance(mode):
    scene = world([prefill("a")], [decode("d", max_batch=1, kv_capacity_tokens=1)], ttft_s=1e-9, tbt_s=1e-9)
    for stage in Stage:
        assert check(stage, scene, mode) is None


@given(others=st.integers(0, 5), prefill_end_s=st.floats(0, 9), decode_end_s=st.floats(10, 99))
async def test_a_load_without_a_request_is_what_it_was_before_that_came(others, prefill_end_s, decode_end_s):
    ledger = MemoryLedger()
    for number in range(others):
        other = Reservation(f"o{number}", "p", 1.0, "d", 500, prefill_end_s, decode_end_s + number % 2)
        await ledger.reserve(other, Limits(), 0.0)
    before = ledger.load("d", 0.0)
    mine = Reservation("mine", "p", 1.0, "d", 700, prefill_end_s, decode_end_s)
    await ledger.reserve(mine, Limits(), 0.0)
    after = without_arriving(ledger.load("d", 0.0), mine)
    assert (after.batch, after.arriving, after.kv_tokens) == (before.batch, before.arriving, before.kv_tokens)
    assert list(after.prefill_ends) == list(before.prefill_ends)
    assert list(after.decode_ends) == list(before.decode_ends)
    assert decode_now(after) == decode_now(before)


def test_a_place_that_was_lost_says_when_the_load_will_have_fallen():
    idle = world([prefill("a")], ttft_s=4.0)
    found = placed(idle)
    queue = world([prefill("a", queued_s=9.0)], ttft_s=4.0)
    lost = conductor().lost(RefusalReason.TTFT, ask(), found, queue)
    # The prompt itself takes a second: three of the target's four are left for the queue.
    assert (lost.reason, lost.retry_after_s) == (RefusalReason.TTFT, pytest.approx(6.0))
    found = placed(world([prefill("a")], [decode("d0", kv_capacity_tokens=31_000)]))
    full = world([prefill("a")], [decode("d0", load=BUSY, kv_capacity_tokens=31_000)])
    lost = conductor().lost(RefusalReason.KV_MEMORY, ask(), found, full)
    # Those who decode end in the bucket at five seconds; this request would arrive after one.
    assert lost.retry_after_s == pytest.approx(4.1, abs=0.11)


def test_decode_candidates_are_explained_as_they_are_when_the_request_arrives():
    ending = InstanceLoad(batch=30, kv_tokens=30_000, decode_ends=((5, 10, 10_000), (500, 20, 20_000)))
    scene = world([prefill("a", queued_s=2.0)], [decode("d", load=ending)])
    found = placed(scene)
    (seen,) = found.considered_decode
    assert (seen.batch, seen.kv_tokens) == (20, 20_000)
    assert seen.tbt_s == pytest.approx(found.tbt_s)
