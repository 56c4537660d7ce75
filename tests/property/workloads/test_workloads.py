"""Prompts, distributions and generated sessions."""

from __future__ import annotations

import json
import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.blocks import block_keys
from mooncake_simulator.workloads import (
    BLOCK_TOKENS,
    Request,
    SessionShape,
    Vocabulary,
    describe,
    generate,
    parse_distribution,
    prompt_json,
    prompt_tokens,
)
from mooncake_simulator.workloads.distributions import parse_quantity


@st.composite
def requests(draw: st.DrawFn) -> Request:
    length = draw(st.integers(1, 3 * BLOCK_TOKENS))
    blocks = -(-length // BLOCK_TOKENS)
    ids = draw(st.lists(st.integers(0, 10**9), min_size=blocks, max_size=blocks, unique=True))
    return Request(timestamp_ms=0, input_length=length, output_length=1, hash_ids=tuple(ids))


vocabularies = st.builds(Vocabulary, st.sampled_from([2, 373, 32_000, 128_256]), st.integers(0, 5))


@settings(max_examples=50)
@given(requests(), vocabularies)
def test_a_prompt_has_its_length_and_its_json_is_the_same(request: Request, vocabulary: Vocabulary) -> None:
    tokens = prompt_tokens(request, vocabulary)
    assert len(tokens) == request.input_length
    assert max(tokens) < vocabulary.size
    assert json.loads(prompt_json(request, vocabulary)) == tokens.tolist()
    assert prompt_tokens(request, vocabulary) == tokens


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4)
)
def test_prompts_share_block_keys_exactly_as_deep_as_they_share_ids(one: list[int], two: list[int]) -> None:
    def keys(ids: list[int]) -> array[int]:
        request = Request(
            timestamp_ms=0, input_length=BLOCK_TOKENS * len(ids), output_length=1, hash_ids=tuple(ids)
        )
        return block_keys(prompt_tokens(request), BLOCK_TOKENS)

    shared = next(
        (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    first, second = keys(one), keys(two)
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])


def test_another_seed_shares_nothing() -> None:
    request = Request(timestamp_ms=0, input_length=512, output_length=1, hash_ids=(0,))
    assert prompt_tokens(request, Vocabulary(seed=0)) != prompt_tokens(request, Vocabulary(seed=1))


def test_the_tokens_of_a_block_are_fixed_for_all_time() -> None:
    request = Request(timestamp_ms=0, input_length=4, output_length=1, hash_ids=(46,))
    assert prompt_tokens(request).tolist() == FIXED


FIXED = [20493, 14474, 4015, 6435]


shapes = st.builds(
    SessionShape,
    turns=st.sampled_from(["1", "4", "geometric:2"]).map(parse_distribution),
    gap_s=st.sampled_from(["const:10s", "exp:30s", "lognormal:60s:1.0"]).map(parse_distribution),
    arrival=st.sampled_from(["poisson", "uniform", "burst"]),
    sessions_per_s=st.floats(0.1, 10),
    burst=st.integers(1, 5),
    system_prompts=st.integers(1, 3),
    system_tokens=st.sampled_from(["const:512", "uniform:1:2000"]).map(parse_distribution),
    max_input_tokens=st.sampled_from([3_000, 126_195]),
)


@settings(max_examples=60)
@given(st.integers(1, 15), st.integers(0, 10**6), shapes)
def test_generated_sessions_are_valid_ordered_and_the_same_by_seed(
    sessions: int, seed: int, shape: SessionShape
) -> None:
    made = generate(sessions, seed, shape)
    assert made == generate(sessions, seed, shape)
    assert len(made) >= sessions
    times = [request.timestamp_ms for request in made]
    assert times == sorted(times)
    for request in made:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        assert request.output_length >= 1
        assert request.input_length <= max(shape.max_input_tokens, 2_001)


@given(st.integers(0, 1000), st.integers(2, 6))
def test_each_turn_begins_with_all_full_blocks_of_the_one_before(seed: int, turns: int) -> None:
    shape = SessionShape(turns=parse_distribution(str(turns)), gap_s=parse_distribution("const:1s"))
    made = generate(1, seed, shape)
    assert 1 <= len(made) <= turns
    for before, after in pairwise(made):
        full = before.input_length // BLOCK_TOKENS
        assert after.hash_ids[:full] == before.hash_ids[:full]
        assert after.input_length > before.input_length + before.output_length
        if before.input_length % BLOCK_TOKENS:
            assert before.hash_ids[-1] not in after.hash_ids


def test_sessions_share_system_prompts_and_nothing_else() -> None:
    shape = SessionShape(
        system_prompts=2, system_tokens=parse_distribution("const:1k"), turns=parse_distribution("1")
    )
    made = generate(40, 5, shape)
    beginnings = {request.hash_ids[0] for request in made}
    assert len(beginnings) == 2
    rest = [hash_id for request in made for hash_id in request.hash_ids[1:]]
    assert len(rest) == len(set(rest))


def test_the_defaults_are_like_the_published_conversations() -> None:
    told = describe(generate(4_000, 1))
    assert told.input_tokens.mean == pytest.approx(12_035, rel=0.12)
    assert told.input_tokens.p50 == pytest.approx(6_909, rel=0.15)
    assert told.input_tokens.p90 == pytest.approx(27_367, rel=0.15)
    assert told.output_tokens.mean == pytest.approx(343, rel=0.12)
    assert told.token_hit_rate == pytest.approx(0.374, abs=0.05)


@pytest.mark.parametrize("arrival", ["poisson", "uniform", "burst"])
def test_every_arrival_process_keeps_the_rate(arrival: str) -> None:
    shape = SessionShape(arrival=arrival, sessions_per_s=2, turns=parse_distribution("1"))  # type: ignore[arg-type]
    made = generate(400, 3, shape)
    assert made[-1].timestamp_ms == pytest.approx(200_000, rel=0.15)
    ticks = len({request.timestamp_ms for request in made})
    assert ticks == (40 if arrival == "burst" else pytest.approx(400, abs=4))


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("7", 7),
        ("const:10s", 10),
        ("const:2m", 120),
        ("const:1.5k", 1500),
        ("exp:250ms", 0.25),
        ("uniform:1:3", 2),
        ("lognormal:10:0.5", 11.33),
        ("geometric:1.64", 1.64),
        ("geometric:1", 1),
        ("quantiles:0:10:10:10:10", 7.5),
    ],
)
def test_a_distribution_has_the_mean_that_was_written(text: str, mean: float) -> None:
    distribution = parse_distribution(text)
    chance = random.Random(1)
    values = [distribution.draw(chance) for _ in range(20_000)]
    assert min(values) >= 0
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.04)
    assert str(distribution) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("normal:1:2", "expected a number or one of const:X"),
        ("", "expected a number"),
        ("exp", "expected exp:MEAN"),
        ("exp:1:2", "expected exp:MEAN"),
        ("exp:-3", "not a number"),
        ("exp:3d", "not a number"),
        ("exp:0", "write const:0"),
        ("uniform:3:1", "above"),
        ("lognormal:0:1", "write const:0"),
        ("geometric:0.5", "at least 1"),
        ("quantiles:1:2:3:2:5", "must not fall"),
    ],
)
def test_a_wrong_distribution_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_distribution(text)


@given(st.text(max_size=12))
def test_no_text_crashes_the_reader_of_distributions(text: str) -> None:
    for read in (parse_distribution, parse_quantity):
        try:
            read(text)
        except ValueError:
            continue


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 sessions"):
        generate(0, 1)
    with pytest.raises(ValueError, match="more than 0"):
        generate(1, 1, SessionShape(sessions_per_s=0))
