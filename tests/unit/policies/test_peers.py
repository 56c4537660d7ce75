"""The published formulas of peers, by numbers that can be worked out by hand."""

import pytest

from mooncake_core.ledger import InstanceLoad
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.model import InstanceView, NoInstanceError
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import Script, ask, decode, instance, prefill, world

PEERS = ["dynamo", "vllm-kv-aware", "sglang-cache-aware", "llm-d-weighted"]


def worker(name, *, held=0, fetchable=None, role=Role.PREFILL, ssd=0, **load):
    """A worker with blocks of 100 tokens; `load` are fields of `InstanceLoad`."""
    return InstanceView(
        instance(name, role, block_size_tokens=100, kv_capacity_tokens=10_000),
        InstanceLoad(**load),
        hbm_tokens=held,
        fetchable_tokens=held if fetchable is None else fetchable,
        fetch_ssd_tokens=ssd,
    )


def chosen(policy, views, decodes=None, *, request=None, chance=None):
    placement = policy.place(request or ask(), world(views, decodes), chance or Script())
    return (placement.prefill or placement.decode).id


def test_dynamo_chooses_as_in_the_example_of_its_documentation():
    # Ten blocks are asked for. Held 2, 5, 8: 8, 5, 2 to prefill. Decode blocks 10, 5, 9: costs 18, 10, 11.
    views = [
        worker("one", held=200, role=Role.BOTH, kv_tokens=1_000),
        worker("two", held=500, role=Role.BOTH, kv_tokens=500),
        worker("three", held=800, role=Role.BOTH, kv_tokens=900),
    ]
    assert chosen(create("dynamo"), views, views) == "two"
    # Twice the weight on prefill: 26, 15, 13.
    assert chosen(create("dynamo", prefill_load_scale=2.0), views, views) == "three"


def test_dynamo_adds_what_is_queued_in_tokens():
    # a: (900 + 1000 - 800) / 100 = 11 blocks; b: (0 + 1000) / 100 = 10.
    views = [worker("a", held=800, queued_tokens=900), worker("b")]
    assert chosen(create("dynamo"), views) == "b"
    views = [worker("a", held=800, queued_tokens=700), worker("b")]
    assert chosen(create("dynamo"), views) == "a"


def test_dynamo_lets_credit_fade_where_more_is_queued_than_elsewhere():
    # a has 500 tokens more queued: half a request. Decay 2: the credit of 8 blocks halves; 15 - 4 against 10.
    views = [worker("a", held=800, queued_tokens=500), worker("b")]
    assert chosen(create("dynamo"), views) == "a"
    assert chosen(create("dynamo", overlap_score_credit_decay=2.0), views) == "b"


def test_dynamo_counts_blocks_of_a_shared_cache_only_where_told_to():
    # a: 10 blocks and 1 decode block, less 0 or 0.5 · 8 from the store; b: 10 - 2.
    views = [worker("a", fetchable=800, kv_tokens=100), worker("b", held=200)]
    assert chosen(create("dynamo"), views) == "b"
    assert chosen(create("dynamo", shared_cache_multiplier=0.5), views) == "a"


def test_dynamo_weighs_active_requests_only_where_told_to():
    views = [worker("a", held=200, batch=3), worker("b")]
    assert chosen(create("dynamo"), views) == "a"
    assert chosen(create("dynamo", decode_active_request_weight=1.0), views) == "b"


def test_dynamo_draws_by_a_softmax_above_temperature_zero():
    # Costs 10, 9, 8 over their spread of 2: weights e^-1, e^-0.5, 1 of 1.974: a below .186, b below .494.
    views = [worker("a"), worker("b", held=100), worker("c", held=200)]
    policy = create("dynamo", router_temperature=1.0)
    drawn = [chosen(policy, views, chance=Script(number)) for number in (0.18, 0.19, 0.49, 0.50)]
    assert drawn == ["a", "b", "b", "c"]


def test_dynamo_decodes_where_the_fewest_blocks_are():
    placement = create("dynamo").place(
        ask(), world([prefill("a")], [decode("d0", 1, 9_000), decode("d1", 9, 8_000)]), Script()
    )
    assert placement.decode.id == "d1"


def test_vllm_multiplies_tokens_by_the_requests_that_are_there():
    # a: (1000 - 800 + 300) · 3 = 1500; b: (1000 - 400 + 200) · 2 = 1600; c: 1000 · 1.
    views = [
        worker("a", held=800, queued=2, queued_tokens=300),
        worker("b", held=400, queued=1, queued_tokens=200),
        worker("c"),
    ]
    assert chosen(create("vllm-kv-aware"), views[:2]) == "a"
    assert chosen(create("vllm-kv-aware"), views) == "c"


def test_vllm_credits_what_a_store_has_in_part_and_its_disk_less():
    # a: 1000 - 200 - 0.6 · 500 = 500, on disk 1000 - 200 - 0.3 · 500 = 650; b: 1000 - 400 = 600.
    memory, disk = worker("a", held=200, fetchable=700), worker("a", held=200, fetchable=700, ssd=500)
    other = worker("b", held=400)
    assert chosen(create("vllm-kv-aware"), [memory, other]) == "a"
    assert chosen(create("vllm-kv-aware"), [disk, other]) == "b"
    assert chosen(create("vllm-kv-aware", kv_penalty_disk=0.5), [disk, other]) == "a"


def test_vllm_never_credits_the_last_token():
    # All is held: 1 · 3 on a, and 2 · 1 on b, which lacks one token more.
    views = [worker("a", held=1_000, queued=2), worker("b", held=998)]
    assert chosen(create("vllm-kv-aware"), views) == "b"


def test_vllm_decodes_where_the_fewest_requests_are():
    placement = create("vllm-kv-aware").place(
        ask(), world([prefill("a")], [decode("d0", 2, 100), decode("d1", 1, 9_000)]), Script()
    )
    assert placement.decode.id == "d1"


def test_sglang_follows_a_match_above_its_threshold_however_long_the_queue():
    views = [worker("a", held=301, queued=60), worker("b")]
    assert chosen(create("sglang-cache-aware"), views) == "a"
    views = [worker("a", held=300, queued=60), worker("b")]
    assert chosen(create("sglang-cache-aware"), views) == "b"


def test_sglang_takes_the_shortest_queue_where_loads_differ_by_both_thresholds():
    # 65 - 0 is above 64, and above 1.5 times 0.
    assert chosen(create("sglang-cache-aware"), [worker("a", held=900, queued=65), worker("b")]) == "b"
    # 205 - 140 is above 64, but not above 1.5 times 140.
    views = [worker("a", held=900, queued=205), worker("b", queued=140)]
    assert chosen(create("sglang-cache-aware"), views) == "a"
    views = [worker("a", held=900, queued=5), worker("b")]
    assert chosen(create("sglang-cache-aware", balance_abs_threshold=4), views) == "b"


def test_llm_d_adds_up_weighted_scores():
    # a: 3 · .9 + 2 · 0 + 2 = 4.7; b: 3 · 0 + 2 · 1 + 2 = 4; c: 3 · .5 + 2 · .5 + 2 = 4.5.
    views = [worker("a", held=900, queued=4), worker("b"), worker("c", held=500, queued=2)]
    assert chosen(create("llm-d-weighted"), views) == "a"
    # a: 2.7 + 2; b: 3 + 2; c: 1.5 + 1.5 + 2.
    assert chosen(create("llm-d-weighted", queue_weight=3.0), views) in {"b", "c"}
    assert chosen(create("llm-d-weighted", queue_weight=4.0), views) == "b"


def test_llm_d_prefers_free_memory():
    # a: 3 · .2 + 2 + 2 · (1 - .5) = 3.6; b: 0 + 2 + 2 = 4; at .1 used a has 4.4.
    assert chosen(create("llm-d-weighted"), [worker("a", held=200, kv_tokens=5_000), worker("b")]) == "b"
    assert chosen(create("llm-d-weighted"), [worker("a", held=200, kv_tokens=1_000), worker("b")]) == "a"


@pytest.mark.parametrize("name", PEERS)
def test_an_engine_fetches_from_the_store_where_that_is_faster(name):
    # 700 tokens over the network in 0.07 s, 300 computed in 0.3 s: below 1.0 s of computing all.
    placement = create(name).place(ask(), world([prefill("a", fetchable=700)]), Script())
    assert (placement.fetch_tokens, placement.prefix_tokens) == (700, 700)
    assert placement.ttft_s == pytest.approx(0.07 + 0.3)
    # From SSD at 1 ms a token it is not.
    scene = world([prefill("a", fetchable=700, fetch_ssd_tokens=700)])
    placement = create(name).place(ask(), scene, Script())
    assert placement.fetch_tokens == 0
    placement = create(name).place(ask(), world([prefill("a", fetchable=700, fetch="none")]), Script())
    assert (placement.fetch_tokens, placement.ttft_s) == (0, pytest.approx(1.0))


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_formula_pairs_only_who_may_work_together(name):
    scene = world([prefill("a", hbm=999, revision="r2"), prefill("b")], [decode("d0", 9, 9_000)])
    placement = create(name).place(ask(), scene, Script())
    assert (placement.prefill.id, placement.decode.id) == ("b", "d0")
    with pytest.raises(NoInstanceError, match="one revision"):
        create(name).place(ask(), world([prefill("a", revision="r2")]), Script())


@pytest.mark.parametrize("name", PEERS)
def test_equals_are_told_apart_by_chance_on_both_sides(name):
    scene = world([prefill("a"), prefill("b")], [decode("d0"), decode("d1")])
    pairs = {
        (placed.prefill.id, placed.decode.id)
        for numbers in [(0.1, 0.1), (0.1, 0.9), (0.9, 0.1), (0.9, 0.9)]
        for placed in [create(name).place(ask(), scene, Script(*numbers))]
    }
    assert pairs == {("a", "d0"), ("a", "d1"), ("b", "d0"), ("b", "d1")}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dynamo", {"prefill_load_scale": -1.0}, "prefill_load_scale is 0 or more, not -1.0"),
        ("vllm-kv-aware", {"kv_penalty_disk": 1.5}, "kv_penalty_disk is a share from 0 to 1, not 1.5"),
        ("vllm-kv-aware", {"kv_aware_temperature": -1.0}, "kv_aware_temperature is 0 or more"),
        ("sglang-cache-aware", {"cache_threshold": 30}, "cache_threshold is a share from 0 to 1, not 30"),
        ("sglang-cache-aware", {"balance_rel_threshold": 0.5}, "balance_rel_threshold is a ratio"),
        (
            "sglang-cache-aware",
            {"balance_abs_threshold": -1},
            "balance_abs_threshold is a number of requests",
        ),
        ("llm-d-weighted", {"queue_weight": -2.0}, "a scorer's weight is 0 or more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(name, settings, message):
    with pytest.raises(ValueError, match=message):
        create(name, **settings)
