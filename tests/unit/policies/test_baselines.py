"""The policies that the paper compares with, and how policies are made by name."""

from typing import get_args

import pytest

from mooncake_core.api.scheduler import Routing
from mooncake_scheduler.policies import UnknownPolicyError, create, names
from mooncake_testing.worlds import Script, ask, decode, prefill, world


def test_cache_aware_counts_only_what_an_instance_holds():
    scene = world([prefill("a", hbm=800, queued_s=0.5), prefill("b", hbm=0, fetchable=800)])
    placement = create("cache-aware").place(ask(), scene, Script())
    assert placement.prefill.id == "a"
    assert placement.fetch_tokens == 0


def test_load_balance_is_blind_to_caches():
    scene = world([prefill("a", hbm=999, queued_s=0.1), prefill("b")])
    assert create("load-balance").place(ask(), scene, Script()).prefill.id == "b"


def test_random_takes_any_pair():
    scene = world([prefill("a", queued_s=9), prefill("b")], [decode("d0", 9), decode("d1")])
    placement = create("random").place(ask(), scene, Script(0.0))
    assert (placement.prefill.id, placement.decode.id) == ("a", "d0")
    placement = create("random").place(ask(), scene, Script(0.99))
    assert (placement.prefill.id, placement.decode.id) == ("b", "d1")


def test_round_robin_takes_each_in_turn_in_whatever_order_they_are_listed():
    policy = create("round-robin")
    views = [prefill("a"), prefill("b"), prefill("c")]
    chosen = [
        policy.place(ask(), world(order), Script()).prefill.id for order in (views, views[::-1], views, views)
    ]
    assert chosen == ["a", "b", "c", "a"]


def test_round_robin_passes_over_an_instance_without_a_partner():
    policy = create("round-robin")
    scene = world([prefill("a", revision="r2"), prefill("b")])
    assert [policy.place(ask(), scene, Script()).prefill.id for _ in range(2)] == ["b", "b"]


@pytest.mark.parametrize("name", names())
def test_every_policy_takes_the_settings_of_routing(name):
    policy = create(name, balancing_threshold=2.0, disaggregation_threshold_tokens=256)
    assert policy.name == name


def test_manifests_offer_every_policy_that_there_is_and_no_other():
    assert get_args(Routing.model_fields["policy"].annotation) == names()


def test_an_unknown_policy_is_refused_with_the_names_that_exist():
    with pytest.raises(
        UnknownPolicyError, match="kv-centric, algorithm-1, cache-aware, load-balance, random, round-robin"
    ):
        create("fastest")


def test_a_setting_that_no_policy_has_is_refused():
    with pytest.raises(TypeError, match="balancing_treshold"):
        create("random", balancing_treshold=2.0)


@pytest.mark.parametrize(
    "setting", [{"balancing_threshold": 0.5}, {"disaggregation_threshold_tokens": -1}, {"tie_window": -0.1}]
)
def test_a_number_out_of_bounds_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        create("kv-centric", **setting)
