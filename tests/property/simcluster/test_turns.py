"""Simulated instances take turns: what was promised at admission is kept, and short prompts go first."""

from __future__ import annotations

from math import inf
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import Waiting
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.rebinding import MOST_MOVES
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.failures import Failure
from mooncake_simulator.cluster.outcome import Outcome
from mooncake_simulator.cluster.prefill import Job
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.cluster.turns import OrderedQueue
from mooncake_simulator.workloads.traces import BLOCK_TOKENS, Request, blocks_of


def a_trace(prompts: list[tuple[int, int]]) -> list[Request]:
    """Prompts of their own; each is (milliseconds after the one before, tokens)."""
    requests, at_ms, block = [], 0, 0
    for gap_ms, tokens in prompts:
        at_ms += gap_ms
        blocks = tuple(range(block, block + blocks_of(tokens)))
        block += len(blocks)
        requests.append(Request(timestamp_ms=at_ms, input_length=tokens, output_length=2, hash_ids=blocks))
    return requests


shared_prompts = st.lists(
    st.tuples(st.integers(0, 2_000), st.integers(1, 60_000), st.integers(0, 3), st.integers(0, 60)),
    min_size=1,
    max_size=40,
)


def with_shared_prefixes(prompts: list[tuple[int, int, int, int]]) -> list[Request]:
    """Each is (milliseconds after the one before, tokens, family, blocks of that at its start)."""
    requests, at_ms, own = [], 0, 1_000_000
    for gap_ms, tokens, family, shared in prompts:
        at_ms += gap_ms
        count = blocks_of(tokens)
        blocks = [family * 1_000 + at for at in range(min(shared, count))]
        own += 1_000
        blocks += [own + at for at in range(count - len(blocks))]
        requests.append(
            Request(timestamp_ms=at_ms, input_length=tokens, output_length=2, hash_ids=tuple(blocks))
        )
    return requests


PIPELINE = LLAMA3_70B_A800.over(3, tensor=8, pipeline=3)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from([1.0, 5.0, 30.0]),
    st.sampled_from([None, 0.03]),
    st.sampled_from(["none", "peer", "store"]),
    shared_prompts,
)
@example(1, 1, 3.0, None, "none", [(0, 43_418, 1, 2), (1, 17_881, 1, 2)])
# While the KV of one with a promise is on its way, one without a promise could begin that takes longer.
@example(
    2,
    0,
    1.0,
    None,
    "peer",
    [(0, 1, 0, 0), (0, 1, 3, 1), (1, 10_000, 0, 0), (0, 55_000, 0, 0), (0, 4_000, 3, 1)],
)
@example(
    3,
    0,
    1.0,
    None,
    "store",
    [(0, 2_000, 0, 3), (0, 10_500, 0, 0), (308, 16_000, 0, 0), (0, 15_000, 0, 0), (0, 9_445, 0, 5)],
)
@example(
    2,
    0,
    1.0,
    None,
    "store",
    [(0, 13_000, 0, 39), (2_335, 13_000, 0, 0), (1, 27_000, 0, 40), (0, 13_000, 0, 11)],
)
@example(
    2,
    0,
    1.0,
    None,
    "store",
    [(0, 27_000, 0, 46), (5_891, 20_000, 0, 8), (1, 9_000, 0, 0), (0, 29_558, 0, 53)],
)
def test_a_ttft_promised_at_admission_is_kept(
    instances: int, pipelines: int, target_s: float, tbt_target_s: float | None,
    fetch: Literal["none", "peer", "store"], prompts: list[tuple[int, int, int, int]],
) -> None:  # fmt: skip
    kinds = (PIPELINE,) * pipelines + (LLAMA3_70B_A800,) * (instances - pipelines)
    spec = ClusterSpec(
        instances, 2, prefill_profiles=kinds, admission=AdmissionMode.PREDICTIVE, ttft_target_s=target_s,
        tbt_target_s=tbt_target_s, fetch=fetch, cache_tokens=None,
    )  # fmt: skip
    for outcome in simulate(spec, with_shared_prefixes(prompts)).outcomes:
        if outcome.promised_ttft_s is not None:
            assert outcome.prefill_ended_s is not None
            assert outcome.prefill_ended_s - outcome.arrival_s <= outcome.promised_ttft_s + 2e-3
        elif outcome.refused is None:
            # Longer than the target by itself: only an instance with nothing to do takes it.
            assert outcome.ttft_s is not None
            assert outcome.ttft_s > target_s


def test_a_prefix_that_made_room_while_its_prompt_waited_is_fetched_when_its_turn_comes() -> None:
    # Room for 130 blocks: the prefix (40), the one that runs (60), and the one that goes first (70).
    def run(fetch: Literal["none", "store"]) -> Outcome:
        trace = with_shared_prefixes(
            [(0, 20_480, 0, 40), (9_000, 30_720, 1, 0), (1, 35_840, 2, 0), (1, 70_000, 0, 40)]
        )
        spec = ClusterSpec(
            1, 1, fetch=fetch, cache_tokens=130 * BLOCK_TOKENS, admission=AdmissionMode.PREDICTIVE,
            ttft_target_s=19.0,
        )  # fmt: skip
        return simulate(spec, trace).outcomes[-1]

    fetched, computed = run("store"), run("none")
    assert (fetched.cached_tokens, fetched.fetched_tokens) == (20_480, 20_480)
    assert computed.cached_tokens == 0
    assert fetched.ttft_s is not None
    assert computed.ttft_s is not None
    # Its KV comes at the network's speed: that is all by which it is later than predicted.
    late_s = 20_480 * LLAMA3_70B_A800.kv_bytes_per_token / LLAMA3_70B_A800.network_bytes_per_s
    assert fetched.predicted_ttft_s == computed.predicted_ttft_s
    assert fetched.ttft_s == pytest.approx(computed.predicted_ttft_s + late_s, abs=1e-3)


def test_short_prompts_go_first_with_kv_centric_and_wait_in_line_with_algorithm_1() -> None:
    # One instance: a long prompt computes, another waits, and then short ones come.
    trace = a_trace([(0, 60_000), (100, 60_000), (100, 500), (100, 500)])
    ordered = simulate(ClusterSpec(1, 1, fetch="none"), trace).outcomes
    in_line = simulate(ClusterSpec(1, 1, fetch="none", policy="algorithm-1"), trace).outcomes
    ends_s = [[each.arrival_s + each.ttft_s for each in run if each.ttft_s] for run in (ordered, in_line)]
    assert ends_s[0][2] < ends_s[0][3] < ends_s[0][1]
    assert ends_s[1] == sorted(ends_s[1])
    for outcome in in_line:
        # First come, first served: what is predicted at arrival is what comes.
        assert outcome.ttft_s == pytest.approx(outcome.predicted_ttft_s)


def test_a_long_prompt_is_overtaken_by_short_ones_only_for_a_time() -> None:
    # Short ones take all the instance's time from the start, and never end.
    shorts = [(600, 4_900)] * 400
    trace = a_trace([(0, 4_900), (1, 30_000), *shorts])
    outcome = simulate(ClusterSpec(1, 1, fetch="none"), trace).outcomes[1]
    span_s = sum(gap_ms for gap_ms, _ in shorts) / 1e3
    assert outcome.ttft_s is not None
    assert outcome.prefill_s < outcome.ttft_s < span_s / 2


@pytest.mark.parametrize(
    ("promised_s", "began_s"),
    [
        # At 4 s the short one is still on its way; it goes next as soon as it can.
        ((inf, inf, inf), {"long": 0.0, "longer": 4.0, "short, fetched": 10.0}),
        # The longer one would take until 10 s: the instance stands idle for the second that is left.
        ((6.0, inf, inf), {"long": 0.0, "short, fetched": 5.0, "longer": 6.0}),
        # Nothing may go before it.
        ((6.0, 10.0, inf), {"long": 0.0, "short, fetched": 5.0, "longer": 6.0}),
        # To stand idle would break a promise too: the one that is there goes on.
        ((6.0, inf, 11.5), {"long": 0.0, "longer": 4.0, "short, fetched": 10.0}),
        # Who cannot be in time any more is nobody's reason to stand idle.
        ((5.5, inf, inf), {"long": 0.0, "longer": 4.0, "short, fetched": 10.0}),
    ],
)
def test_a_prompt_whose_kv_is_still_being_fetched_is_passed_over_unless_that_breaks_a_promise(
    promised_s: tuple[float, float, float], began_s: dict[str, float]
) -> None:
    agenda = Agenda()
    queue = OrderedQueue(agenda, QueueOrder())
    began: dict[str, float] = {}

    def job(name: str, ready_s: float, seconds: float, latest_s: float) -> Job:
        def begin() -> tuple[float, float]:
            began[name] = agenda.now_s
            return seconds, 0.0

        return Job(ready_s, begin, lambda: None, Waiting(0.0, int(seconds * 1e6), latest_s))

    short_s, long_s, longer_s = promised_s
    queue.add(job("short, fetched", 5.0, 1.0, short_s))
    queue.add(job("long", 0.0, 4.0, long_s))
    queue.add(job("longer", 0.0, 6.0, longer_s))
    agenda.run()
    assert began == began_s
    assert queue.busy_s == 11.0


def test_who_waits_at_one_instance_is_computed_by_another_that_has_nothing_to_do() -> None:
    # Of two long ones each was bound to an instance of its own; then short ones overtook one of them.
    trace = a_trace([(0, 40_000), (0, 40_000), (0, 20_000), (500, 20_000), (0, 10_000), (0, 2_000)])
    outcomes = simulate(ClusterSpec(2, 1, fetch="none"), trace).outcomes
    assert [each.moved for each in outcomes] == [1, 0, 0, 0, 0, 0]
    last_s = max(each.arrival_s + each.ttft_s for each in outcomes if each.ttft_s is not None)
    costs_s = [each.prefill_s for each in outcomes]
    # What no schedule exceeds in which nobody is idle while others wait (Graham 1966).
    assert last_s <= sum(costs_s) / 2 + max(costs_s) / 2


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.sampled_from(["none", "peer", "store"]), shared_prompts, st.booleans())
def test_moving_those_who_wait_loses_nobody_and_computes_nobody_twice(
    instances: int, fetch: Literal["none", "peer", "store"], prompts: list[tuple[int, int, int, int]],
    fails: bool,
) -> None:  # fmt: skip
    requests = with_shared_prefixes(prompts)
    failures = (Failure("p-0", 3.0, 5.0),) if fails else ()
    spec = ClusterSpec(instances, 1, fetch=fetch, failures=failures)
    run = simulate(spec, requests)
    assert all(each.completed for each in run.outcomes)
    assert all(each.moved <= MOST_MOVES * (1 + each.placed_again) for each in run.outcomes)
    if not fails:
        assert sum(run.prefill_busy_s) == pytest.approx(sum(each.prefill_s for each in run.outcomes))
    again = simulate(spec, requests)
    assert [each.ttft_s for each in run.outcomes] == [each.ttft_s for each in again.outcomes]
