"""What engines report raises the load that is seen, never lowers it, and is forgotten when it is old."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.ledger import InstanceLoad, Limits
from mooncake_core.registry import EngineReport, Role
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.reports import (
    FRESH_S,
    NOTHING,
    STALE_S,
    Foreign,
    Known,
    faded,
    foreign_work,
    weight_of,
    with_foreign,
    within_ledger,
)
from mooncake_scheduler.gateway.reported import Reported
from mooncake_testing.worlds import ROUND_COSTS, instance

DECODE = instance("d0", Role.DECODE, kv_capacity_tokens=100_000)
PREFILL = instance("p0", Role.PREFILL, kv_capacity_tokens=100_000)
BOTH = instance("b0", Role.BOTH, kv_capacity_tokens=100_000)
COSTS = CostModels(default=ROUND_COSTS)

counts = st.integers(0, 500)
reports = st.builds(
    EngineReport, running=counts, waiting=counts, kv_usage=st.floats(0, 1), at_s=st.floats(0, 100)
)
loads = st.builds(
    InstanceLoad, queued_s=st.floats(0, 100), queued=counts, batch=counts, arriving=counts,
    kv_tokens=st.integers(0, 200_000),
)  # fmt: skip


@given(report=reports, load=loads, weight=st.floats(0, 1), role=st.sampled_from([DECODE, PREFILL, BOTH]))
def test_no_report_ever_lowers_what_the_ledger_knows(report, load, weight, role):
    seen = with_foreign(load, faded(foreign_work(report, Known.of(load), role, ROUND_COSTS), weight))
    assert seen.queued_s >= load.queued_s
    assert seen.queued >= load.queued
    assert seen.batch >= load.batch
    assert seen.kv_tokens >= load.kv_tokens
    assert (seen.arriving, seen.decode_ends) == (load.arriving, load.decode_ends)


def test_a_report_of_no_more_than_the_ledger_knows_says_nothing():
    load = InstanceLoad(batch=3, arriving=1, kv_tokens=9_000)
    report = EngineReport(running=4, kv_usage=0.09)
    assert foreign_work(report, Known.of(load), DECODE, ROUND_COSTS) == NOTHING


def test_what_came_past_the_ledger_is_decode_prefill_or_both_by_role():
    report = EngineReport(running=4, waiting=2, kv_usage=0.12)
    assert foreign_work(report, Known(), DECODE, ROUND_COSTS) == Foreign(0, 0.0, 6, 12_000)
    # 2 000 tokens each, at a millisecond a token
    assert foreign_work(report, Known(), PREFILL, ROUND_COSTS) == Foreign(6, pytest.approx(12.0), 0, 12_000)
    assert foreign_work(report, Known(), BOTH, ROUND_COSTS) == Foreign(2, pytest.approx(4.0), 4, 12_000)


@given(st.floats(-20, 20), st.floats(-20, 20))
def test_a_report_counts_less_the_older_it_is(one, other):
    if abs(one) <= abs(other):
        assert weight_of(one) >= weight_of(other)
    assert weight_of(FRESH_S) == 1
    assert weight_of(STALE_S) == weight_of(-STALE_S) == 0


def test_limits_of_the_ledger_leave_out_what_it_does_not_know_of_and_stay_limits():
    foreign = Foreign(queued_s=2.0, batch=5, kv_tokens=7_000)
    assert within_ledger(Limits(3.0, 8, 10_000), foreign, foreign) == Limits(1.0, 3, 3_000)
    assert within_ledger(Limits(3.0, 4, 5_000), foreign, foreign) == Limits(1.0, 1, 1)
    assert within_ledger(Limits(), foreign, foreign) == Limits()


# -- over time


def heard(reported, report, now_s):
    reported.hear({"d0": report}, [DECODE], COSTS, now_s, 1.0)
    return reported.foreign.get("d0", NOTHING)


def test_work_that_ended_between_a_report_and_its_reading_is_not_foreign():
    reported = Reported()
    reported.know({"d0": InstanceLoad(batch=4, kv_tokens=4_000)}, 100.0)
    reported.know({}, 100.1)
    assert heard(reported, EngineReport(running=4, kv_usage=0.04, at_s=99.9), 100.2) == NOTHING
    for tick in range(100):
        reported.know({}, 101.0 + tick * 0.1)
    assert heard(reported, EngineReport(running=4, kv_usage=0.04, at_s=110.9), 111.0).batch == 4


def test_a_report_that_froze_fades_and_is_gone_and_the_next_one_counts_in_full():
    reported = Reported()
    report = EngineReport(running=8, at_s=50.0)
    assert heard(reported, report, 50.5).batch == 8
    assert 0 < heard(reported, report, 54.0).batch < 8
    assert heard(reported, report, 56.5) == NOTHING
    assert heard(reported, EngineReport(running=8, at_s=57.0), 57.0).batch == 8


def test_what_our_own_ledger_promises_later_does_not_make_an_old_report_foreign():
    reported = Reported()
    report = EngineReport(running=2, at_s=50.0)
    reported.know({"d0": InstanceLoad(batch=2)}, 50.0)
    assert heard(reported, report, 50.0) == NOTHING
    for tick in range(40):
        reported.know({}, 51.0 + tick * 0.2)
    # The two have ended; the report still tells of them, and of nobody else.
    assert heard(reported, report, 52.0) == NOTHING
