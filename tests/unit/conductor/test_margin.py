"""The promised share of admitted requests meets its TTFT target though predictions are off."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, MemoryLedger
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels, class_of
from mooncake_scheduler.conductor.margin import LEAST_SEEN, MOST, TtftMargins
from mooncake_scheduler.conductor.model import Ask, InstanceView, Placement, Refused, Slo, World
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import ROUND_COSTS, Script, ask, instance, prefill, world

TARGET_S = 8.0


class Outcomes(NamedTuple):
    """Of the requests after the first five minutes."""

    refused: float
    """Share of all."""
    late: float
    """Share of those admitted."""


async def overloaded(*, learns: bool, spread: float, hand_over_s: float, seed: int) -> Outcomes:
    """One prefill instance with half as much again to do as it can, on the real ledger.

    Args:
        learns: Whether the Conductor is told what predictions were worth.
        spread: How far prefills differ from what is predicted (log-normal).
        hand_over_s: What every first token takes beyond, which nobody predicts.
        seed: Of arrivals, sizes and the spread.
    """
    chance = random.Random(seed)
    costs = CostModels(default=ROUND_COSTS)
    conductor = Conductor(create("kv-centric"), Admission(AdmissionMode.PREDICTIVE), costs, Script())
    ledger = MemoryLedger()
    first, last = instance("p", Role.PREFILL), instance("d", Role.DECODE)
    now_s = free_s = 0.0
    ends: list[tuple[float, Ask, Placement, float]] = []
    refused, late = [], []
    for number in range(3_000):
        now_s += chance.expovariate(1.5)
        while ends and ends[0][0] <= now_s:
            end_s, done, placement, arrived_s = ends.pop(0)
            ledger.prefill_finished(done.id, end_s)
            ledger.release(done.id, end_s)
            ttft_s = end_s + hand_over_s - arrived_s
            if learns:
                conductor.observe_ttft(class_of(first), placement.ttft_s, ttft_s, TARGET_S)
            if arrived_s > 300:
                late.append(ttft_s > TARGET_S)
        one = Ask(str(number), chance.randint(300, 1_700), 1)
        load = ledger.load("p", now_s)
        scene = World(
            now_s, [InstanceView(first, load)], [InstanceView(last, InstanceLoad())], costs, Slo(TARGET_S)
        )
        placement = conductor.decide(one, scene)
        if now_s > 300:
            refused.append(isinstance(placement, Refused))
        if isinstance(placement, Refused):
            continue
        limits = conductor.limits(one, placement, scene)
        assert await ledger.reserve(conductor.reservation(one, placement, now_s), limits, now_s) is None
        free_s = max(free_s, now_s) + placement.prefill_s * chance.lognormvariate(0, spread)
        ends.append((free_s, one, placement, now_s))
    return Outcomes(sum(refused) / len(refused), sum(late) / len(late))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("spread", "hand_over_s"), [(0.5, 0.0), (0.2, 1.0), (0.7, 0.5)])
async def test_under_overload_nine_in_ten_admitted_requests_are_in_time(
    spread: float, hand_over_s: float, seed: int
) -> None:
    blind = await overloaded(learns=False, spread=spread, hand_over_s=hand_over_s, seed=seed)
    seeing = await overloaded(learns=True, spread=spread, hand_over_s=hand_over_s, seed=seed)
    assert blind.late > 0.2
    assert seeing.late <= 0.13
    # Throughput is the instance's: a shorter queue refuses little more.
    assert seeing.refused <= blind.refused + 0.05


async def test_exact_predictions_cost_no_room() -> None:
    blind = await overloaded(learns=False, spread=0.0, hand_over_s=0.0, seed=1)
    seeing = await overloaded(learns=True, spread=0.0, hand_over_s=0.0, seed=1)
    assert seeing == blind


# -- the learned margin


def margin_after(ratios: list[float], predicted_s: float = 7.0, percentile: int = 90) -> float:
    costs = CostModels(default=ROUND_COSTS)
    margins = TtftMargins(costs, percentile)
    for ratio in ratios:
        margins.observe("p", predicted_s, predicted_s * ratio, TARGET_S)
    return costs.of_class("p").ttft_margin


def test_a_margin_is_the_promised_quantile_of_measured_over_predicted() -> None:
    assert margin_after([1 + n / 100 for n in range(100)]) == pytest.approx(1.9, abs=0.05)
    assert margin_after([1 + n / 100 for n in range(100)], percentile=50) == pytest.approx(1.5, abs=0.05)


def test_a_margin_is_bounded_and_needs_some_observations_of_predictions_near_the_target() -> None:
    assert margin_after([9.0] * 100) == MOST
    assert margin_after([0.5] * 100) == 1.0
    assert margin_after([1.5] * (LEAST_SEEN - 1)) == 1.0
    assert margin_after([1.5] * 100, predicted_s=0.1) == 1.0


def test_a_margin_is_given_back_when_predictions_are_right_again() -> None:
    assert margin_after([1.6] * 300 + [1.0] * 300) == 1.0


def test_only_predictive_admission_leaves_room_and_an_idle_instance_is_never_refused() -> None:
    model = CostModel(b_s_per_token=1e-3, ttft_margin=1.5)
    queue = world([prefill("a", queued_s=2.0)], costs=model, ttft_s=4.0)
    for mode, admitted in ((AdmissionMode.PREDICTIVE, False), (AdmissionMode.EARLY, True)):
        conductor = Conductor(create("kv-centric"), Admission(mode), queue.cost, Script())
        answer = conductor.decide(ask(1_000), queue)
        assert isinstance(answer, Placement) is admitted
    conductor = Conductor(create("kv-centric"), Admission(AdmissionMode.PREDICTIVE), CostModels(), Script())
    idle = world([prefill("a")], costs=model, ttft_s=4.0)
    assert isinstance(conductor.decide(ask(3_500), idle), Placement)
    refused = conductor.decide(ask(1_000), queue)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == pytest.approx(3.0 - 4.0 / 1.5)
