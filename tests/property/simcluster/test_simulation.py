"""What holds in every simulated cluster, whatever the trace."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.policies import names
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads.traces import Request, blocks_of

alone, pipeline = LLAMA3_70B_A800, LLAMA3_70B_A800.over(3, tensor=8, pipeline=3)
# Too small for some requests, for a few at once, and for all of them.
memories = [msgspec.structs.replace(alone, kv_capacity_tokens=tokens) for tokens in (20_000, 60_000)] + [
    alone
]


def cluster(prefill: int, pipelines: int, **settings: Any) -> ClusterSpec:
    """Of the instances that prefill, some are pipelines of three Pods."""
    kinds = (pipeline,) * min(pipelines, prefill) + (alone,) * (prefill - pipelines)
    return ClusterSpec(prefill, prefill_profiles=kinds if pipelines else (), **settings)


specs = st.builds(
    cluster,
    prefill=st.integers(1, 4),
    pipelines=st.integers(0, 2),
    profile=st.sampled_from(memories),
    decode=st.integers(1, 3),
    max_batch=st.sampled_from([0, 0, 1, 4]),
    policy=st.sampled_from(names()),
    admission=st.sampled_from(AdmissionMode),
    holding=st.sampled_from([None, True, False]),
    ttft_target_s=st.sampled_from([None, 2.0, 30.0]),
    tbt_target_s=st.sampled_from([None, 0.03, 0.1]),
    fetch=st.sampled_from(["none", "peer", "store"]),
    cache_tokens=st.sampled_from([8 * 512, 40 * 512, None]),
    store_tokens=st.sampled_from([20 * 512, None]),
    join_load_bytes_per_s=st.sampled_from([0.0, 30e9]),
)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    requests = []
    time_ms = 0.0
    for _ in range(draw(st.integers(1, 25))):
        time_ms += draw(st.floats(0, 3_000))
        tokens = draw(st.integers(1, 40_000))
        first = draw(st.integers(0, 3)) * 1_000
        blocks = tuple(range(first, first + blocks_of(tokens)))
        # Some far longer than anybody expects: these outgrow memory.
        output = draw(st.integers(1, 600) | st.integers(4_000, 12_000))
        requests.append(
            Request(timestamp_ms=time_ms, input_length=tokens, output_length=output, hash_ids=blocks)
        )
    return requests


@settings(max_examples=150, deadline=None)
@given(specs, traces())
def test_no_request_is_lost_and_memory_is_never_exceeded(spec: ClusterSpec, trace: list[Request]) -> None:
    result = simulate(spec, trace)
    assert result.requests == len(trace)
    assert result.completed + result.refused == len(trace)
    assert result.most_kv_tokens <= spec.profile.kv_capacity_tokens
    for outcome in result.outcomes:
        assert outcome.completed != (outcome.refused is not None)
        assert not outcome.wasted_prefill or outcome.refused
        if outcome.completed:
            assert outcome.ttft_s is not None
            assert outcome.ended_s is not None
            assert outcome.ttft_s >= outcome.prefill_s * (1 - 1e-9)
            assert outcome.ended_s >= outcome.arrival_s + outcome.ttft_s - 1e-9
            assert outcome.cached_tokens < outcome.prompt_tokens


@settings(max_examples=40, deadline=None)
@given(specs, traces(), st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_result_to_the_last_bit(
    spec: ClusterSpec, trace: list[Request], seed: int
) -> None:
    assert simulate(spec, trace, seed=seed) == simulate(spec, trace, seed=seed)


def test_answers_that_outgrow_memory_put_the_last_comer_off_and_both_end() -> None:
    # Both fit by what is expected of their answers, not by how long they become.
    long = Request(timestamp_ms=0, input_length=650_000, output_length=60_000, hash_ids=tuple(range(1270)))
    later = replace_blocks(long, 10_000)
    result = simulate(ClusterSpec(2, 1, fetch="none"), [long, later])
    first, second = result.outcomes
    assert result.completed == 2
    assert result.put_off == 1
    assert result.most_kv_tokens <= result_capacity_tokens()
    assert first.ended_s is not None
    assert second.ended_s is not None
    assert second.ended_s > first.ended_s


def result_capacity_tokens() -> int:
    """KV that fits on a decode instance of the default profile."""
    return ClusterSpec(1, 1).profile.kv_capacity_tokens


def test_a_refusal_by_stage_wastes_its_prefill_only_at_decode() -> None:
    trace = [
        Request(timestamp_ms=10.0 * at, input_length=2_000, output_length=2_000, hash_ids=(4 * at, 1, 2, 3))
        for at in range(200)
    ]
    spec = ClusterSpec(8, 1, tbt_target_s=0.03, admission=AdmissionMode.NONE)
    baseline = simulate(spec, trace)
    assert baseline.wasted_prefills == baseline.refused > 0
    predictive = simulate(replace(spec, admission=AdmissionMode.PREDICTIVE, holding=False), trace)
    assert predictive.wasted_prefills == 0
    assert predictive.refused > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ttft_target_s": -1.0}, "ttft_target_s is a number of seconds above 0"),
        ({"tbt_target_s": nan}, "tbt_target_s is a number of seconds above 0"),
        ({"cache_tokens": -5}, "cache_tokens is a number of tokens"),
        ({"store_tokens": -1}, "store_tokens is a number of tokens"),
        ({"max_batch": -1}, "max_batch is a number of requests"),
        ({"chunk_tokens": 0}, "chunk_tokens is at least 1"),
        ({"join_load_bytes_per_s": -1.0}, "join_load_bytes_per_s is a finite number"),
    ],
)
def test_amounts_that_cannot_be_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterSpec(1, 1, **settings)


def test_events_happen_in_order_of_time_whatever_they_lead_to() -> None:
    agenda = Agenda()
    seen: list[tuple[float, str]] = []

    def happens(name: str, *leads_to: tuple[float, str]) -> None:
        seen.append((agenda.now_s, name))
        for time_s, follows in leads_to:
            agenda.at(time_s, happens, follows)

    agenda.at(2.0, happens, "second")
    agenda.at(1.0, happens, "first", (0.5, "was to be before it"), (3.0, "last"))
    agenda.at(2.0, happens, "at the same time, put in later")
    agenda.run()
    assert seen == [
        (1.0, "first"),
        (1.0, "was to be before it"),
        (2.0, "second"),
        (2.0, "at the same time, put in later"),
        (3.0, "last"),
    ]


@pytest.mark.parametrize("speed", [0.0, -1.0, inf, nan])
def test_time_has_to_pass_and_not_backwards(speed: float) -> None:
    with pytest.raises(ValueError, match="speed is trace seconds a second"):
        simulate(ClusterSpec(1, 1), [], speed=speed)


def replace_blocks(request: Request, offset: int) -> Request:
    """The same request with a prompt of its own."""
    return Request(
        timestamp_ms=request.timestamp_ms,
        input_length=request.input_length,
        output_length=request.output_length,
        hash_ids=tuple(block + offset for block in request.hash_ids),
    )
