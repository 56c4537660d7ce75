"""Instances that die and come back: nobody is lost, and who was being answered is told."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_scheduler.policies import names
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.failures import DECODE_DIED, NO_INSTANCE, Failure
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.cluster.tiers import StoreTiers
from mooncake_simulator.workloads.traces import Request, blocks_of


def request(at_s: float, tokens: int, output: int, first: int) -> Request:
    blocks = tuple(range(first, first + blocks_of(tokens)))
    return Request(timestamp_ms=1e3 * at_s, input_length=tokens, output_length=output, hash_ids=blocks)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    at_s, trace = 0.0, []
    for _ in range(draw(st.integers(1, 20))):
        at_s += draw(st.just(0.0) | st.floats(0, 3))
        first = 1_000 * draw(st.integers(0, 3))
        trace.append(request(at_s, draw(st.integers(1, 40_000)), draw(st.integers(1, 400)), first))
    return trace


@st.composite
def failures(draw: st.DrawFn) -> tuple[Failure, ...]:
    """Of each instance one after the other, written down in any order; after the last it may stay away."""
    found = []
    for instance in draw(st.lists(st.sampled_from(["p-0", "p-1", "d-0", "d-1"]), min_size=1, unique=True)):
        back_s = 0.0
        for _ in range(draw(st.integers(1, 2))):
            at_s = back_s + draw(st.floats(0.01, 20))
            back_s = at_s + draw(st.floats(0.01, 20))
            found.append(Failure(instance, at_s, back_s))
        if draw(st.booleans()):
            found[-1] = replace(found[-1], back_s=inf)
    return tuple(draw(st.permutations(found)))


specs = st.builds(
    ClusterSpec,
    prefill=st.just(2),
    decode=st.just(2),
    policy=st.sampled_from(names()),
    admission=st.sampled_from(AdmissionMode),
    ttft_target_s=st.sampled_from([None, 2.0, 30.0]),
    tbt_target_s=st.sampled_from([None, 0.03, 0.1]),
    fetch=st.sampled_from(["none", "peer", "store"]),
    cache_tokens=st.sampled_from([40 * 512, None]),
    failures=failures(),
)


@settings(max_examples=150, deadline=None)
@given(specs, traces(), st.booleans())
def test_every_request_ends_in_exactly_one_way(spec: ClusterSpec, trace: list[Request], tiers: bool) -> None:
    if tiers and spec.fetch == "store":
        spec = replace(spec, tiers=StoreTiers(60 * 512))
    result = simulate(spec, trace, seed=1)
    assert result.completed + result.refused + result.failed == len(trace)
    for outcome in result.outcomes:
        ends = (outcome.completed, outcome.refused is not None, outcome.failed is not None)
        assert sum(ends) == 1
        if outcome.completed:
            assert outcome.ttft_s is not None
            assert outcome.ended_s is not None
            assert outcome.ended_s >= outcome.arrival_s + outcome.ttft_s - 1e-9
    assert result == simulate(spec, trace, seed=1)


def test_what_a_dead_prefill_had_queued_is_computed_elsewhere_and_its_cache_is_gone() -> None:
    trace = [request(0.1 * at, 20_000, 50, 1_000 * at) for at in range(4)]
    spec = ClusterSpec(2, 1, policy="round-robin", fetch="none")
    whole = simulate(spec, trace)
    spec = replace(spec, failures=(Failure("p-0", 1.0),))
    result = simulate(spec, trace)
    assert result.completed == 4
    assert [outcome.placed_again for outcome in result.outcomes].count(1) == 2
    assert result.mean_ttft_s > whole.mean_ttft_s
    # One that died and came back has nothing of what it held.
    repeated = [request(0.0, 20_000, 5, 0), request(60.0, 20_000, 5, 0)]
    alone = ClusterSpec(1, 1, fetch="none")
    assert simulate(alone, repeated).outcomes[1].cached_tokens > 0
    died = simulate(replace(alone, failures=(Failure("p-0", 20.0, 21.0),)), repeated)
    assert died.outcomes[1].cached_tokens == 0


def test_answers_that_had_begun_at_a_dead_decode_fail_and_others_go_to_another() -> None:
    trace = [request(0.0, 2_000, 2_000, 0), request(19.8, 2_000, 100, 1_000)]
    spec = ClusterSpec(1, 2, fetch="none")
    whole = simulate(spec, trace).outcomes
    assert whole[0].ended_s is not None
    assert whole[0].ended_s > 20.0
    for name in ("d-0", "d-1"):
        result = simulate(replace(spec, failures=(Failure(name, 20.0),)), trace)
        assert result.failed + result.completed == 2
        failed = [outcome for outcome in result.outcomes if outcome.failed]
        assert all(outcome.failed == DECODE_DIED and outcome.ttft_s is not None for outcome in failed)
    both = tuple(Failure(name, 20.0) for name in ("d-0", "d-1"))
    result = simulate(replace(spec, failures=both), trace)
    assert result.outcomes[0].failed == DECODE_DIED
    assert result.outcomes[1].refused == NO_INSTANCE


@pytest.mark.parametrize("policy", ["kv-centric", "algorithm-1"])
def test_a_dead_prefill_does_not_count_as_busy_with_what_it_had_begun(policy: str) -> None:
    trace = [request(0.0, 60_000, 5, 0), request(2.5, 60_000, 5, 1_000)]
    spec = ClusterSpec(1, 1, policy=policy, failures=(Failure("p-0", 1.0, 2.0),))
    result = simulate(spec, trace)
    lost, served = result.outcomes
    assert (lost.refused, served.refused) == (NO_INSTANCE, None)
    assert result.prefill_busy_s == [pytest.approx(1.0 + served.prefill_s)]
    assert result.load is not None
    # Ten seconds a window: one of them before it died, and 7.5 since the other one came.
    assert result.load.prefill == [pytest.approx(0.85)]


def test_who_waits_elsewhere_comes_to_an_instance_that_is_back() -> None:
    # All of them queue at the other one, and nobody arrives later.
    long = [request(1.0 + 0.1 * at, 30_000, 5, 1_000 * at) for at in range(4)]
    spec = ClusterSpec(2, 1, fetch="none", failures=(Failure("p-0", 0.5, 4.0),))
    result = simulate(spec, [request(0.0, 1, 1, 9_000), *long])
    assert sum(outcome.moved for outcome in result.outcomes) == 2
    assert result.prefill_busy_s == [pytest.approx(result.prefill_busy_s[1], abs=0.01)] * 2


def test_without_anybody_to_prefill_arrivals_are_refused_until_one_is_back() -> None:
    trace = [request(at, 2_000, 5, 0) for at in (0.0, 11.0, 21.0)]
    spec = ClusterSpec(1, 1, fetch="none", failures=(Failure("p-0", 10.0, 20.0),))
    assert [outcome.refused for outcome in simulate(spec, trace).outcomes] == [None, NO_INSTANCE, None]


def test_a_cluster_that_lost_an_instance_still_serves_most_within_its_targets() -> None:
    trace = [request(0.25 * at, 4_000, 60, 10 * at) for at in range(400)]
    spec = ClusterSpec(4, 2, ttft_target_s=5.0, tbt_target_s=0.1, admission=AdmissionMode.PREDICTIVE)
    result = simulate(replace(spec, failures=(Failure("p-1", 30.0, 60.0), Failure("d-0", 50.0, 70.0))), trace)
    assert result.goodput > 0.9
    assert 0 < result.failed < 40


def test_failures_that_cannot_be_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="there are p-0, d-0"):
        ClusterSpec(1, 1, failures=(Failure("p-7", 1.0),))
    with pytest.raises(ValueError, match="the second after the first"):
        Failure("p-0", 5.0, 5.0)
    again = Failure("d-0", 4.0, 6.0), Failure("p-0", 2.0), Failure("d-0", 1.0, 5.0)
    with pytest.raises(ValueError, match="d-0 cannot die at 4 s: it died at 1 s and is back at 5 s"):
        ClusterSpec(1, 1, failures=again)
    with pytest.raises(ValueError, match="p-0 cannot die at 3 s: it died at 2 s and is back at inf s"):
        ClusterSpec(1, 1, failures=(Failure("p-0", 3.0, 4.0), Failure("p-0", 2.0)))
    ClusterSpec(1, 1, failures=(Failure("p-0", 3.0, 4.0), Failure("p-0", 1.0, 2.0), Failure("d-0", 1.5)))
    with pytest.raises(ValueError, match="coupled engines"):
        ClusterSpec(2, 0, coupled="chunked", fetch="none", failures=(Failure("b-0", 1.0),))
