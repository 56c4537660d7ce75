"""Cost models fitted online find the truth, and never say anything absurd on their way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.cost import CostFitting, CostModel, CostModels

PROFILE = CostModel.from_profile(LLAMA3_70B_A800)
PROMPTS = (512, 4_096, 16_384, 100_000)

truths = st.builds(
    CostModel,
    a_s=st.floats(0, 0.05),
    b_s_per_token=st.floats(2e-5, 5e-4),
    c_s_per_token2=st.floats(0, 5e-9),
    t0_s=st.floats(0.005, 0.05),
    t1_s_per_request=st.floats(5e-5, 1e-3),
    t2_s_per_token=st.floats(1e-8, 1e-7),
)
priors = st.sampled_from([None, PROFILE])


def prompts(seed):
    chance = random.Random(seed)
    while True:
        tokens = int(2 ** chance.uniform(8, 17))
        yield tokens, int(chance.choice([0.0, 0.0, chance.random()]) * tokens), chance


def fit_prefill(truth, prior, *, seed=0, count=400, noise=0.0, slow=0.0, costs=None):
    costs = costs or CostModels(default=prior)
    fitting = CostFitting(costs)
    for (tokens, cached, chance), _ in zip(prompts(seed), range(count), strict=False):
        seconds = truth.prefill_s(tokens, cached) * chance.uniform(1 - noise, 1 + noise)
        fitting.observe_prefill("x", tokens, cached, seconds * (10 if chance.random() < slow else 1))
    return costs.of_class("x")


def assert_agrees(found, truth, within):
    for tokens in PROMPTS:
        assert found.prefill_s(tokens, 0) == pytest.approx(truth.prefill_s(tokens, 0), rel=within)
        half = tokens // 2
        assert found.prefill_s(tokens, half) == pytest.approx(truth.prefill_s(tokens, half), rel=within)


@settings(max_examples=20, deadline=None)
@given(truths, priors, st.integers(0, 1_000))
def test_prefill_is_learned_from_noisy_observations(truth, prior, seed):
    assert_agrees(fit_prefill(truth, prior, seed=seed, count=600, noise=0.1), truth, 0.1)


@settings(max_examples=15, deadline=None)
@given(truths, priors, st.integers(0, 1_000))
def test_a_tenfold_slow_outlier_now_and_then_changes_little(truth, prior, seed):
    assert_agrees(fit_prefill(truth, prior, seed=seed, count=600, noise=0.05, slow=0.02), truth, 0.15)


def test_one_outlier_is_hardly_felt():
    costs = CostModels(default=PROFILE)
    fit_prefill(PROFILE, PROFILE, noise=0.02, costs=costs)
    before = costs.of_class("x").prefill_s(8_192, 0)
    fitting = CostFitting(costs)
    fitting.observe_prefill("x", 8_192, 0, 10 * before)
    assert costs.of_class("x").prefill_s(8_192, 0) < 1.15 * before


@settings(max_examples=15, deadline=None)
@given(truths, priors, st.integers(0, 1_000))
def test_decode_steps_are_learned(truth, prior, seed):
    chance = random.Random(seed)
    costs = CostModels(default=prior)
    fitting = CostFitting(costs)
    for _ in range(500):
        batch = chance.randint(1, 64)
        kv_tokens = int(batch * 2 ** chance.uniform(9, 14))
        fitting.observe_step(
            "x", batch, kv_tokens, truth.step_s(batch, kv_tokens) * chance.uniform(0.95, 1.05)
        )
    found = costs.of_class("x")
    assert found.knows_decode
    for batch, kv_tokens in ((1, 4_096), (16, 100_000), (64, 300_000)):
        assert found.step_s(batch, kv_tokens) == pytest.approx(truth.step_s(batch, kv_tokens), rel=0.08)


observations = st.lists(
    st.tuples(st.integers(1, 150_000), st.floats(0, 1), st.floats(1e-4, 1e3)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(observations, priors)
def test_whatever_is_observed_nothing_negative_is_predicted_and_longer_never_takes_less(seen, prior):
    costs = CostModels(default=prior)
    fitting = CostFitting(costs)
    for tokens, share, seconds in seen:
        fitting.observe_prefill("x", tokens, int(tokens * share), seconds)
        fitting.observe_step("x", 1 + tokens % 64, tokens, seconds)
        model = costs.of_class("x")
        assert min(model.a_s, model.b_s_per_token, model.c_s_per_token2) >= 0
        assert min(model.t0_s, model.t1_s_per_request, model.t2_s_per_token) >= 0
    times = [model.prefill_s(tokens, 500) for tokens in range(501, 20_000, 750)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_hardware_that_changed_is_followed():
    costs = CostModels(default=PROFILE)
    fitting = CostFitting(costs)
    for factor, count in ((1.0, 300), (3.0, 600)):
        for (tokens, cached, _), _ in zip(prompts(1), range(count), strict=False):
            fitting.observe_prefill("x", tokens, cached, factor * PROFILE.prefill_s(tokens, cached))
    assert costs.of_class("x").prefill_s(8_192, 0) == pytest.approx(3 * PROFILE.prefill_s(8_192, 0), rel=0.1)


def test_steady_traffic_of_one_length_does_not_wear_away_the_rest():
    costs = CostModels(default=PROFILE)
    fitting = CostFitting(costs)
    chance = random.Random(2)
    for _ in range(3_000):
        fitting.observe_prefill("x", 2_048, 0, PROFILE.prefill_s(2_048, 0) * chance.uniform(0.9, 1.1))
    found = costs.of_class("x")
    assert found.prefill_s(2_048, 0) == pytest.approx(PROFILE.prefill_s(2_048, 0), rel=0.05)
    assert found.prefill_s(65_536, 0) == pytest.approx(PROFILE.prefill_s(65_536, 0), rel=0.35)


def test_a_class_without_a_profile_is_cold_until_enough_of_different_sizes_was_seen():
    costs = CostModels()
    fitting = CostFitting(costs)
    for _ in range(40):
        fitting.observe_prefill("x", 1_000, 0, 0.1)
    assert not costs.of_class("x").knows_prefill
    fitting.observe_prefill("x", 4_000, 0, 0.4)
    assert costs.of_class("x").knows_prefill
    assert not costs.of_class("x").knows_decode
    assert not costs.of_class("y").knows_prefill


def test_traffic_of_one_size_is_known_after_long_enough():
    costs = CostModels()
    fitting = CostFitting(costs)
    for _ in range(300):
        fitting.observe_prefill("x", 1_000, 0, 0.1)
    model = costs.of_class("x")
    assert model.knows_prefill
    assert model.prefill_s(1_000, 0) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 1.0), (10, 0.0), (10, -1.0), (10, float("nan")), (10, float("inf"))]
)
def test_an_observation_that_cannot_be_is_ignored(tokens, seconds):
    costs = CostModels(default=PROFILE)
    fitting = CostFitting(costs)
    fitting.observe_prefill("x", tokens, 0, seconds)
    fitting.observe_step("x", tokens, 0, seconds)
    assert costs.of_class("x") == PROFILE or seconds == 1.0
