"""Shares of tokens between tenants."""

import pytest

from mooncake_scheduler.conductor.fairness import (
    LEAST_BESIDE_WANTING,
    LEAST_TENANT_SHARE,
    MOST_TENANTS,
    FairShare,
    priority_share,
    tenant_share,
)


def test_tokens_fade_by_half_in_a_half_life():
    share = FairShare(half_life_s=10)
    share.charge("a", 1_000, 0.0)
    assert share.tokens("a", 10.0) == pytest.approx(500)
    share.charge("a", 1_000, 10.0)
    assert share.tokens("a", 20.0) == pytest.approx(750)


def test_excess_is_measured_against_the_weights():
    share = FairShare({"big": 3.0})
    share.charge("big", 3_000, 0.0)
    share.charge("small", 1_000, 0.0)
    assert share.excess("big", 0.0) == pytest.approx(0)
    assert share.excess("small", 0.0) == pytest.approx(0)
    share.charge("small", 2_000, 0.0)
    assert share.excess("small", 0.0) == pytest.approx(1.0)
    assert share.excess("big", 0.0) == 0


def test_a_quiet_tenant_gives_its_share_to_the_others():
    share = FairShare(half_life_s=1)
    share.charge("gone", 1_000, 0.0)
    share.charge("here", 9_000, 0.0)
    assert share.excess("here", 0.0) > 0.5
    share.charge("here", 9_000, 30.0)
    assert share.excess("here", 30.0) == 0


def test_a_tenant_that_was_refused_counts_for_a_half_life_though_it_was_given_nothing():
    share = FairShare({"refused": 3.0}, half_life_s=10)
    share.charge("served", 1_000, 0.0)
    assert share.excess("served", 0.0) == 0
    share.refuse("refused", 0.0)
    # A quarter of all is what it is entitled to.
    assert share.excess("served", 0.0) == pytest.approx(3.0)
    assert share.excess("refused", 0.0) == 0
    assert share.excess("served", 10.0) == pytest.approx(3.0)
    assert share.excess("served", 10.1) == 0


def test_who_is_over_its_share_gives_way_further_while_another_is_refused_that_has_less_than_its_own():
    share = FairShare()
    share.charge("greedy", 9_000, 0.0)
    share.charge("modest", 1_000, 0.0)
    usual = 1 - (1 - LEAST_TENANT_SHARE) * share.excess("greedy", 0.0)
    assert share.part("greedy", 0.0) == pytest.approx(usual)
    # Refused for being greedy is no hunger.
    share.refuse("greedy", 0.0)
    assert share.part("greedy", 0.0) == pytest.approx(usual)
    share.refuse("modest", 0.0)
    # It lacks four of the five thousand that it is entitled to.
    assert share.part("greedy", 0.0) == pytest.approx(1 - (1 - LEAST_BESIDE_WANTING) * 0.8)
    assert share.part("modest", 0.0) == 1.0
    share.charge("modest", 8_000, 0.0)
    assert share.part("greedy", 0.0) == 1.0


def test_memory_of_who_was_refused_is_bounded():
    share = FairShare()
    for i in range(MOST_TENANTS + 10):
        share.refuse(f"t{i}", float(i) / MOST_TENANTS)
    assert len(share._refused_s) == MOST_TENANTS


def test_unknown_tenants_are_not_over_their_share():
    assert FairShare().excess("who", 5.0) == 0


def test_time_that_runs_back_does_not_make_tokens_grow():
    share = FairShare()
    share.charge("a", 100, 50.0)
    assert share.tokens("a", 40.0) == 100


def test_memory_is_bounded_and_the_least_is_forgotten():
    share = FairShare()
    share.charge("heavy", 10_000, 0.0)
    for i in range(MOST_TENANTS + 10):
        share.charge(f"t{i}", 10, 0.0)
    assert share.tokens("heavy", 0.0) == 10_000
    assert len(share._tokens) == MOST_TENANTS


def test_shares_of_the_limits():
    assert [priority_share(p, 0) for p in (5, 0, -1, -9)] == [1.0, 1.0, 0.9, 0.5]
    assert [tenant_share(e) for e in (0.0, 0.5, 3.0)] == pytest.approx([1.0, 0.9, 0.8])
    assert [tenant_share(1.0, hunger) for hunger in (0.2, 0.5, 1.0)] == pytest.approx([0.8, 0.75, 0.5])


def test_a_weight_has_to_be_positive():
    with pytest.raises(ValueError, match="tenant a"):
        FairShare({"a": 0})


def test_other_weights_count_from_then_on_and_a_bad_one_changes_nothing():
    share = FairShare()
    share.charge("a", 3_000, 0.0)
    share.charge("b", 1_000, 0.0)
    assert share.excess("a", 0.0) == pytest.approx(0.5)
    share.set_weights({"a": 3.0})
    assert share.excess("a", 0.0) == pytest.approx(0)
    with pytest.raises(ValueError, match="above 0"):
        share.set_weights({"a": 1.0, "b": 0.0})
    assert share.excess("a", 0.0) == pytest.approx(0)
