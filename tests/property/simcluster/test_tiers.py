"""What holds in every simulated cluster whose store has tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.tiering import Planner, Sessions
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.contents import Rule, contents_of
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.cluster.tiers import StoreTiers, TieredStore
from mooncake_simulator.workloads import CONVERSATION, Request, generate, parse_distribution

RULES: Sequence[Rule] = ("lru", "lfu", "length-aware", "predicted", "steered")
BLOCK = 512

SMALL = msgspec.structs.replace(
    CONVERSATION,
    turns=parse_distribution("4"),
    gap_s=parse_distribution("lognormal:20s:1.0"),
    first_tokens=parse_distribution("lognormal:8k:1.0"),
    max_input_tokens=30_000,
)
specs = st.builds(
    ClusterSpec,
    prefill=st.integers(1, 3),
    decode=st.just(2),
    fetch=st.just("store"),
    cache_tokens=st.sampled_from([20 * BLOCK, 200 * BLOCK]),
    store_tokens=st.sampled_from([300 * BLOCK, None]),
    tiers=st.builds(
        StoreTiers,
        dram_tokens=st.sampled_from([BLOCK, 60 * BLOCK, 400 * BLOCK]),
        nodes=st.integers(1, 3),
        rule=st.sampled_from(RULES),
        replicate=st.booleans(),
    ),
)


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(0, 1_000))
def test_all_are_served_and_the_same_seed_gives_the_same_result(spec: ClusterSpec, seed: int) -> None:
    trace = generate(12, seed, SMALL)
    result = simulate(spec, trace, seed=seed)
    assert result.completed == len(trace)
    assert result == simulate(spec, trace, seed=seed)
    assert result.tiers is not None
    assert result.tiers.promoted_blocks == 0 or spec.tiers is None or spec.tiers.rule == "predicted"


prompts = st.tuples(st.integers(0, 4), st.integers(1, 9), st.just(0.0) | st.floats(0, 50), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 25), st.lists(prompts, max_size=40))
def test_dram_never_holds_more_than_fits(
    rule: Rule, capacity: int, history: list[tuple[int, int, float, bool]]
) -> None:
    contents = contents_of(rule, capacity)
    now_s, grown = 0.0, [0] * 5
    for session, more, gap_s, lost in history:
        now_s += gap_s
        grown[session] += more
        blocks = [1_000 * session + at for at in range(grown[session])]
        known = contents.turn(blocks, now_s)
        contents.stored(blocks, known, now_s)
        if lost:
            contents.dropped(blocks[:2])
            assert not any(contents.holds(block) for block in blocks[:2])
        held = [1_000 * one + at for one in range(5) for at in range(grown[one])]
        assert sum(contents.holds(block) for block in held) <= capacity


@settings(max_examples=150, deadline=None)
@given(st.integers(5, 60), st.lists(st.tuples(prompts, st.integers(0, 40)), max_size=40))
def test_a_plan_fits_names_what_is_cold_and_is_scored_once(
    capacity: int, history: list[tuple[tuple[int, int, float, bool], int]]
) -> None:
    planner = Planner(Sessions(), capacity)
    now_s, promoted, grown = 0.0, 0, [0] * 5
    for (number, more, gap_s, arrives), budget in history:
        now_s += gap_s
        grown[number] += more
        session = planner.turn([1_000 * number + at for at in range(grown[number])], "t", now_s)
        planner.stored(session, now_s)
        cold = {key for each in planner.sessions for key in each.keys if not planner.holds(key)}
        promotions, left = planner.promotions(now_s, budget)
        keys = [key for promotion in promotions for key in promotion.keys]
        assert set(keys) <= cold
        assert len(keys) <= budget
        assert not set(left) & {key for key in keys if planner.holds(key)}
        assert planner.used_blocks <= capacity
        promoted += len(keys)
        for promotion in promotions:
            if arrives:
                planner.arrived(promotion, now_s)
    planner.close()
    scores = planner.scores
    assert scores.in_time + scores.late + scores.wasted == promoted


def stored(rule: Rule, dram_blocks: int, *prompts: list[int]) -> TieredStore:
    """A store into which prompts were put one after the other."""
    store = TieredStore(Agenda(), StoreTiers(dram_blocks * BLOCK, 1, rule), LLAMA3_70B_A800)
    for prompt in prompts:
        store.stored(store.turn(prompt, len(prompt) * BLOCK), 0)
    return store


def test_what_lies_on_ssd_comes_at_the_speed_of_the_ssd() -> None:
    size_bytes = 10 * BLOCK * LLAMA3_70B_A800.kv_bytes_per_token
    first, second = list(range(10)), list(range(100, 110))
    store = stored("lru", 10, first, second)
    assert store.fetch(second, 0, 10) == pytest.approx(size_bytes / LLAMA3_70B_A800.network_bytes_per_s)
    store = stored("lru", 10, first, second)
    assert store.fetch(first, 0, 10) == pytest.approx(size_bytes / LLAMA3_70B_A800.ssd_bytes_per_s)
    assert store.cold_blocks(first)[-1] == 10


def test_the_papers_three_rules_keep_what_they_are_named_for() -> None:
    often, long, latest = [1, 2], [10, 11, 12, 13], [20, 21]
    history = (often, often, long, latest)
    held = {}
    for rule in RULES[:3]:
        store = stored(rule, 6, *history)
        cold = [store.cold_blocks(prompt) for prompt in (often, long, latest)]
        held[rule] = [len(counts) - 1 - counts[-1] for counts in cold]
    assert held["lru"] == [0, 4, 2]
    assert held["lfu"] == [2, 2, 2]
    assert held["length-aware"] == [2, 2, 2]
    assert stored("length-aware", 6, *history).cold_blocks(long) == [0, 0, 0, 1, 2]


def test_predicting_beats_lru_where_sessions_do_not_fit_into_dram() -> None:
    shape = msgspec.structs.replace(
        CONVERSATION, turns=parse_distribution("8"), gap_s=parse_distribution("lognormal:60s:1.0")
    )
    trace = generate(150, 7, shape)
    tiers = StoreTiers(1_400_000, 2, "predicted")
    spec = ClusterSpec(8, 8, fetch="store", cache_tokens=256_000, tiers=tiers)
    ours = simulate(spec, trace)
    paper = simulate(replace(spec, tiers=replace(tiers, rule="lru")), trace)
    assert ours.ttft_percentile_s(0.9) < paper.ttft_percentile_s(0.9)
    assert ours.tiers is not None
    assert paper.tiers is not None
    assert ours.tiers.ssd_tokens < paper.tiers.ssd_tokens
    assert 0 < ours.tiers.wasted_share < 0.2


def test_tiers_without_a_shared_store_are_refused() -> None:
    with pytest.raises(ValueError, match="need `fetch` store"):
        ClusterSpec(1, 1, fetch="peer", tiers=StoreTiers(BLOCK))
    with pytest.raises(ValueError, match="give it a node"):
        StoreTiers(BLOCK - 1)


def test_a_partial_block_is_not_kept() -> None:
    store = TieredStore(Agenda(), StoreTiers(10 * BLOCK), LLAMA3_70B_A800)
    request = Request(timestamp_ms=0, input_length=600, output_length=1, hash_ids=(1, 2))
    assert store.turn(request.hash_ids, request.input_length).blocks == (1,)


def waits_s(tiers: StoreTiers, reads: int, every_s: float) -> tuple[list[float], TieredStore]:
    """What each of many readers of one document waits for it, and the store afterwards."""
    agenda = Agenda()
    slow = msgspec.structs.replace(LLAMA3_70B_A800, network_bytes_per_s=12e9)
    store = TieredStore(agenda, tiers, slow)
    document = list(range(32))
    store.stored(store.turn(document, 32 * BLOCK), 0)
    waits = []
    for at in range(reads):
        now_s = 1.0 + at * every_s
        agenda.at(now_s, lambda now_s=now_s: waits.append(store.fetch(document, 0, 32) - now_s))
    store.look_ahead_until(reads * every_s + 600.0)
    agenda.run()
    return waits, store


def test_copies_of_a_hot_document_spread_its_readers_and_are_released_when_it_is_over() -> None:
    # 0.44 s a read, a read every 0.5 s: one node is busy for 87 % of the time.
    tiers = StoreTiers(4_000_000, 8, "lru")
    copied, store = waits_s(replace(tiers, replicate=True), 200, 0.5)
    use = store.used()
    assert use.copied_blocks == use.released_blocks >= 32
    # Read from several nodes at once it is there sooner than one alone could send it.
    assert max(copied[100:]) < 32 * BLOCK * LLAMA3_70B_A800.kv_bytes_per_token / 12e9
    # Two reads every 0.5 s are more than one node can carry.
    alone, _ = waits_s(tiers, 400, 0.25)
    copied, _ = waits_s(replace(tiers, replicate=True), 400, 0.25)
    assert copied[-1] < alone[-1] / 10


def test_a_document_that_is_read_now_and_then_is_not_copied() -> None:
    _, store = waits_s(StoreTiers(4_000_000, 8, "lru", replicate=True), 50, 20.0)
    assert store.used().copied_blocks == 0
