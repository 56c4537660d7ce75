"""Shares of tokens between tenants."""

import pytest

from mooncake_scheduler.conductor.fairness import MOST_TENANTS, FairShare, priority_share, tenant_share


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
