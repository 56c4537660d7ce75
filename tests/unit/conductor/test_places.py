"""How full decode is made by those who wait for a place."""

import random

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import RefusalReason
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.model import Slo
from mooncake_scheduler.conductor.waiting import LEAST_CHANCE, PlaceWaits
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import ROUND_COSTS, instance

DECODE = instance("d", Role.DECODE, kv_capacity_tokens=100_000)


def conductor(*answers, headroom=0.95):
    placer = Conductor(
        create("kv-centric"),
        Admission(AdmissionMode.PREDICTIVE, headroom, holding=True),
        CostModels(default=ROUND_COSTS),
        random.Random(0),
    )
    for tokens in answers:
        placer.observe_output("t", 1_000, tokens)
    return placer


def test_the_half_of_an_answer_that_is_still_to_come_takes_no_time_yet():
    # 20 ms + 1 ms a request + 1 ms a thousand tokens: 30 of 1 000 take 80 ms once all answers are whole.
    slo = Slo(None, 0.080)
    no_growth = conductor(*[1] * 10).seat_limits(slo, DECODE)
    growing = conductor(*[400] * 10).seat_limits(slo, DECODE)
    # 76 ms at a headroom of .95: the 28th request of 1 000 tokens is the last; with 200 fewer each the 31st.
    assert no_growth.exceeded(27, 27_000, 1_000) is None
    assert no_growth.exceeded(28, 28_000, 1_000) is RefusalReason.TBT
    assert growing.exceeded(30, 30_000, 1_000) is None
    assert growing.exceeded(31, 31_000, 1_000) is RefusalReason.TBT


def test_answers_without_end_do_not_make_a_request_cost_less_than_nothing():
    assert conductor(*[90_000] * 10).seat_limits(Slo(None, 0.080), DECODE).request_s == 0


@pytest.mark.parametrize(("headroom", "fills"), [(0.95, 98_000), (0.5, 80_000), (1.0, 100_000)])
def test_memory_is_filled_further_than_time_for_whole_answers_are_promised(headroom, fills):
    limits = conductor(headroom=headroom).seat_limits(Slo(), DECODE)
    assert limits.exceeded(1, fills - 1_000, 1_000) is None
    assert limits.exceeded(1, fills - 999, 1_000) is RefusalReason.KV_MEMORY


def test_fifty_that_found_no_place_in_a_minute_are_enough_to_tell_who_finds_none():
    waits = PlaceWaits()
    for number in range(49):
        waits.observe(40_000, 20.0, 100.0 + number / 2, found=False)
    assert waits.chance(40_000, 20.0, 125.0) >= LEAST_CHANCE
    waits.observe(40_000, 20.0, 125.0, found=False)
    assert waits.chance(40_000, 20.0, 125.0) < LEAST_CHANCE
    assert waits.chance(39_999, 20.0, 125.0) == 0.5
