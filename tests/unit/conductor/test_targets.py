"""Targets of one request."""

import pytest
from msgspec import structs

from mooncake_core.config.scheduler import SloConfig
from mooncake_scheduler.conductor.model import Slo
from mooncake_scheduler.conductor.targets import targets_of
from mooncake_testing.worlds import ROUND_COSTS


def test_seconds_are_taken_as_they_are():
    assert targets_of(SloConfig(ttft_s=2, tbt_s=0.1), 1_000, 10, ROUND_COSTS, ROUND_COSTS) == Slo(2, 0.1)
    assert targets_of(SloConfig(), 1_000, 10, ROUND_COSTS, ROUND_COSTS) == Slo()


def test_multipliers_are_of_the_same_request_on_idle_instances():
    slo = targets_of(SloConfig(ttft_multiplier=10, tbt_multiplier=5), 1_000, 100, ROUND_COSTS, ROUND_COSTS)
    assert slo.ttft_s == pytest.approx(10.0)
    assert slo.tbt_s == pytest.approx(5 * (0.021 + 1_100e-6))


def test_multipliers_give_no_target_while_nothing_is_known():
    cold = structs.replace(ROUND_COSTS, cold=True)
    assert targets_of(SloConfig(ttft_multiplier=10, tbt_multiplier=5), 1_000, 100, cold, cold) == Slo()
