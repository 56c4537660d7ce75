"""What is told of prefills by when they were sent and when they ended."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_scheduler.conductor.cost import Computed, CostFitting, CostModel, CostModels, PrefillPace
from mooncake_scheduler.conductor.cost.pace import TOGETHER_S

TRUTH = CostModel(a_s=0.02, b_s_per_token=1e-4, c_s_per_token2=1e-9)


def test_alone_a_prefill_took_from_its_sending_to_its_end() -> None:
    pace = PrefillPace()
    sent = pace.sent(10.0)
    assert pace.ended(sent, 100, 40, 12.0) == Computed(60, 100 * 100 - 40 * 40, 2.0, alone=True)
    assert pace.under_way == 0


def test_behind_others_it_took_from_the_end_of_the_one_before() -> None:
    pace = PrefillPace()
    first, second, third = pace.sent(0.0), pace.sent(0.1), pace.sent(0.2)
    assert pace.ended(first, 10, 0, 3.0) is None
    assert pace.ended(second, 20, 0, 4.0) == Computed(10, 100, 3.0, alone=True)
    # The last one's end cannot be shared by anybody: told at once, with the one before still untold.
    assert pace.ended(third, 30, 0, 6.0) == Computed(20, 400, 1.0)
    assert pace.ended(pace.sent(7.0), 40, 0, 8.0) == Computed(30, 900, 2.0)


def test_short_prompts_of_one_step_count_together() -> None:
    pace = PrefillPace()
    sent = [pace.sent(0.0) for _ in range(3)]
    assert pace.ended(sent[0], 10, 0, 1.0) is None
    assert pace.ended(sent[1], 10, 0, 1.0 + TOGETHER_S / 2) is None
    assert pace.ended(sent[2], 10, 0, 1.0 + TOGETHER_S * 0.9) == Computed(30, 300, pytest.approx(1.009))


def test_an_abort_leaves_those_behind_it_untold_and_later_ones_are_told_again() -> None:
    pace = PrefillPace()
    first, second = pace.sent(0.0), pace.sent(0.0)
    pace.dropped(first, 1.0)
    assert pace.ended(second, 10, 0, 2.0) is None
    assert pace.ended(pace.sent(3.0), 10, 0, 4.0) == Computed(10, 100, 1.0, alone=True)


def test_an_end_out_of_turn_tells_nothing_and_neither_does_the_one_that_was_overtaken() -> None:
    pace = PrefillPace()
    first, second = pace.sent(0.0), pace.sent(0.0)
    assert pace.ended(second, 10, 0, 1.0) is None
    assert pace.ended(first, 10, 0, 2.0) is None
    assert pace.ended(pace.sent(3.0), 10, 0, 4.0) is not None


def test_behind_somebody_unknown_nothing_is_told() -> None:
    pace = PrefillPace()
    assert pace.ended(pace.sent(0.0, alone=False), 10, 0, 9.0) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 3.0))
def test_at_any_load_the_constants_of_the_engine_are_found_and_nothing_is_told_twice(
    seed: int, load: float
) -> None:
    """A first-come-first-served engine with aborts; load 3 = three times what it can do, for a while."""
    chance = random.Random(seed)
    pace, costs = PrefillPace(), CostModels()
    fitting = CostFitting(costs)
    now_s = free_s = 0.0
    under_way = []
    told = 0

    def end_until(limit_s: float) -> None:
        nonlocal told
        while under_way and under_way[0][0] <= limit_s:
            end_s, sent, tokens, cached, aborted = under_way.pop(0)
            if aborted:
                pace.dropped(sent, end_s)
                continue
            computed = pace.ended(sent, tokens, cached, end_s)
            if computed is not None:
                told += computed.tokens
                fitting.observe_computed("p", computed.tokens, computed.squares, computed.seconds)

    asked = 0
    for _ in range(400):
        now_s += chance.expovariate(load)
        end_until(now_s)
        tokens = int(2 ** chance.uniform(9, 14))
        cached = chance.choice([0, 0, tokens // 2])
        asked += tokens - cached
        free_s = max(now_s, free_s) + TRUTH.prefill_s(tokens, cached)
        under_way.append((free_s, pace.sent(now_s), tokens, cached, chance.random() < 0.02))
    end_until(float("inf"))
    assert pace.under_way == 0
    assert 0 < told <= asked
    found = costs.of_class("p")
    assert found.knows_prefill
    for tokens in (1_000, 4_000, 16_000):
        assert found.prefill_s(tokens, 0) == pytest.approx(TRUTH.prefill_s(tokens, 0), rel=0.05)
