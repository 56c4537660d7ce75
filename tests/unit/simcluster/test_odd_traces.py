"""Traces unlike the published ones: begun in the middle, counted from 1970, with answers too long."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from mooncake_scheduler.policies import registry
from mooncake_scheduler.policies.kv_centric import KvCentric
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.failures import Failure
from mooncake_simulator.cluster.life import TOO_LONG
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads.traces import Request
from mooncakectl.plan.demand import least_size
from mooncakectl.plan.search import Size
from mooncakectl.plan.slo import Objective, Objectives


def request(at_ms: float, output: int, first: int) -> Request:
    blocks = tuple(range(first, first + 8))
    return Request(timestamp_ms=at_ms, input_length=4_000, output_length=output, hash_ids=blocks)


TRACE = [request(1_000.0 * number, 60, 8 * number) for number in range(10)]
SPEC = ClusterSpec(1, 1, fetch="none")


def test_a_trace_counts_from_its_first_request() -> None:
    later = [replace(each, timestamp_ms=each.timestamp_ms + 1.7e12) for each in TRACE]
    here, there = simulate(SPEC, TRACE), simulate(SPEC, later)
    assert there.outcomes == here.outcomes
    assert there.span_s == here.span_s


def test_what_happens_after_the_last_token_is_no_part_of_the_span() -> None:
    late = simulate(ClusterSpec(1, 1, fetch="none", failures=(Failure("d-0", 5_000.0, 5_001.0),)), TRACE)
    assert late.span_s == simulate(SPEC, TRACE).span_s


def test_an_answer_that_never_fits_is_refused_and_the_others_go_on() -> None:
    capacity = SPEC.profile.kv_capacity_tokens
    trace = [*TRACE, request(9_500.0, capacity, 1_000)]
    for spec in (SPEC, ClusterSpec(1, 0, fetch="none", coupled="prefill-first")):
        outcomes = simulate(spec, trace).outcomes
        assert [outcome.refused for outcome in outcomes] == [None] * len(TRACE) + [TOO_LONG]


class PlacedOnce(KvCentric):
    """A policy of turns that only places."""

    name = "placed-once"
    prefill_at = None


def test_a_policy_of_turns_that_cannot_look_again_computes_what_had_to_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry._POLICIES, "placed-once", PlacedOnce)
    spec = ClusterSpec(1, 1, fetch="none", cache_tokens=20 * 512)
    # While the last prompt waits for its turn, the first one's KV, on which it counts, makes room.
    longer = replace(request(60_002.0, 2, 0), input_length=16 * 512, hash_ids=(*range(8), *range(300, 308)))
    trace = [request(0.0, 2, 0), request(60_000.0, 2, 100), request(60_001.0, 2, 200), longer]
    looks = simulate(dataclasses.replace(spec, policy="kv-centric"), trace)
    cannot = simulate(dataclasses.replace(spec, policy="placed-once"), trace)
    assert [outcome.cached_tokens for outcome in cannot.outcomes] == [0, 0, 0, 4 * 512]
    # With one instance and nowhere to fetch from there is nothing to find.
    assert cannot.outcomes == looks.outcomes


def test_a_size_is_ruled_out_only_where_nothing_could_keep_the_slo_there() -> None:
    at_once = [request(0.0, 2_000, 8 * number) for number in range(400)]
    soon = Objective(0.9, 1.0)
    assert least_size(SPEC, at_once, Objectives(soon, None), 1.0).prefill > 1
    assert least_size(SPEC, at_once, Objectives(soon, None), 1.0, jitter_ms=3.6e6) == Size(1, 1)
    steady = Objective(0.9, 0.1)
    assert least_size(SPEC, at_once, Objectives(None, steady), 1.0).decode == 1
