"""Clusters with pipelines of several nodes, and the systems they are compared with, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.prefill import Job, PrefillQueue
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.cluster.systems import chunked, distserve, prefill_first
from mooncake_simulator.workloads.traces import Request, blocks_of

FOUR = LLAMA3_70B_A800.over(4, tensor=8, pipeline=4)
ALONE = CostModel.from_profile(LLAMA3_70B_A800)
GROUP = CostModel.from_profile(FOUR)


def request(at_s: float, tokens: int, number: int, output: int = 2) -> Request:
    first = number * 10_000
    return Request(
        timestamp_ms=at_s * 1e3,
        input_length=tokens,
        output_length=output,
        hash_ids=tuple(range(first, first + blocks_of(tokens))),
    )


def test_the_next_prompt_begins_when_the_first_stage_is_free_and_none_overtakes() -> None:
    agenda = Agenda()
    queue = PrefillQueue(agenda)
    told: list[tuple[str, float]] = []

    def job(name: str, seconds: float, drain_s: float) -> Job:
        return Job(0.0, lambda: (seconds, drain_s), lambda: told.append((name, agenda.now_s)))

    for name, seconds, drain_s in (("long", 4.0, 3.0), ("short", 1.0, 0.5), ("next", 2.5, 1.0)):
        queue.add(job(name, seconds, drain_s))
    agenda.run()
    assert told == [("long", 7.0), ("short", 7.0), ("next", 8.5)]
    assert queue.busy_s == 7.5


def test_a_prompt_on_an_idle_pipeline_takes_what_its_stages_take() -> None:
    spec = ClusterSpec(1, 1, fetch="none", prefill_profiles=(FOUR,))
    result = simulate(spec, [request(0, 100_000, 1), request(0, 100_000, 2)])
    first, second = (outcome.ttft_s for outcome in result.outcomes)
    assert first == pytest.approx(GROUP.prefill_s(100_000, 0))
    assert first < 0.28 * ALONE.prefill_s(100_000, 0)
    assert second == pytest.approx(GROUP.occupied_s(100_000, 0) + GROUP.prefill_s(100_000, 0))


def test_a_prompt_too_long_for_any_single_node_is_in_time_on_the_pipeline_beside_them() -> None:
    kinds = (LLAMA3_70B_A800,) * 4 + (FOUR,)
    spec = ClusterSpec(
        5, 1, prefill_profiles=kinds, admission=AdmissionMode.PREDICTIVE, ttft_target_s=30.0, fetch="none"
    )
    trace = [request(at, 190_000 if at == 5 else 6_000, at) for at in range(10)]
    assert ALONE.prefill_s(190_000, 0) > 30
    result = simulate(spec, trace)
    assert result.goodput == 1.0
    alone = simulate(replace(spec, prefill=4, prefill_profiles=()), trace)
    assert alone.outcomes[5].ttft_s is not None
    assert alone.outcomes[5].ttft_s > 30


def test_a_pipeline_caches_what_all_of_its_nodes_can_keep() -> None:
    first, other = request(0, 40_000, 1), request(60, 40_000, 2)
    again = request(120, 40_000, 1)
    cached = {
        pods: simulate(
            ClusterSpec(1, 1, fetch="none", cache_tokens=50_000, prefill_profiles=profiles),
            [first, other, again],
        ).outcomes[2].cached_tokens
        for pods, profiles in ((1, ()), (4, (FOUR,)))
    }  # fmt: skip
    # One keeps the start of the first prompt beside the other; four keep both.
    assert cached[1] < 10_000
    assert cached[4] > 39_000


def test_the_number_of_profiles_has_to_be_that_of_instances() -> None:
    with pytest.raises(ValueError, match="prefill_profiles has 1 profiles: give one for each of the 2"):
        ClusterSpec(2, 1, prefill_profiles=(FOUR,))
    with pytest.raises(ValueError, match="coupled engines are all of one profile"):
        replace(prefill_first(1), prefill_profiles=(FOUR,))


def test_more_instances_of_a_side_are_of_the_kind_that_it_has() -> None:
    spec = ClusterSpec(1, 2, prefill_profiles=(FOUR,)).resized(3, 1)
    assert (spec.prefill, spec.decode, spec.prefill_profiles) == (3, 1, (FOUR,) * 3)
    with pytest.raises(ValueError, match="instances of one side differ"):
        ClusterSpec(2, 1, prefill_profiles=(FOUR, LLAMA3_70B_A800)).resized(3, 1)


def test_without_a_pool_and_caches_every_prompt_is_computed_whole() -> None:
    trace = [request(10.0 * at, 20_000, 1, output=50) for at in range(4)]
    result = simulate(distserve(2, 1), trace)
    assert [outcome.prefill_s for outcome in result.outcomes] == [ALONE.prefill_s(20_000, 0)] * 4
    assert result.token_hit_rate == 0


def test_engines_that_do_both_make_those_who_decode_wait_and_chunks_make_them_wait_less() -> None:
    # One decodes for some 8 s, and another prompt of 10.5 s comes in between.
    trace = [request(0, 2_000, 1, output=300), request(2, 64_000, 2, output=2)]
    tbt_s = {
        name: simulate(spec, trace).outcomes[0].tbt_s
        for name, spec in {
            "apart": distserve(1, 1),
            "chunks": chunked(1, chunk_tokens=512),
            "prefill first": prefill_first(1),
        }.items()
    }
    assert tbt_s["apart"] is not None
    assert tbt_s["chunks"] is not None
    assert tbt_s["prefill first"] is not None
    assert tbt_s["apart"] < 0.03 < tbt_s["chunks"] < 0.2 < tbt_s["prefill first"]
