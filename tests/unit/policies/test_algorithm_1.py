"""Algorithm 1 of the paper, by numbers that can be worked out by hand."""

import pytest

from mooncake_core.registry import Role
from mooncake_scheduler.conductor.model import NoInstanceError
from mooncake_scheduler.policies import create, names
from mooncake_testing.worlds import Script, ask, decode, prefill, world


def place(scene, *, threshold=1.5, request=None, chance=None):
    policy = create("algorithm-1", balancing_threshold=threshold)
    return policy.place(request or ask(), scene, chance or Script())


def test_the_least_sum_of_queue_and_prefill_wins():
    placement = place(world([prefill("a", hbm=800, queued_s=1.0), prefill("b", hbm=100, queued_s=0.2)]))
    assert placement.prefill.id == "b"
    assert placement.ttft_s == pytest.approx(0.2 + 0.9)
    assert (placement.queue_s, placement.transfer_s, placement.prefill_s) == pytest.approx((0.2, 0, 0.9))


def test_a_prefix_is_fetched_where_the_ratio_is_above_the_threshold():
    # b: 800 / 400 = 2 > 1.5: 400 tokens over the network in 0.04 s, 200 computed in 0.2 s. a: 1.0 + 0.2.
    placement = place(world([prefill("a", hbm=800, queued_s=1.0), prefill("b", hbm=400, fetchable=800)]))
    assert placement.prefill.id == "b"
    assert (placement.prefix_tokens, placement.fetch_tokens) == (800, 400)
    assert placement.ttft_s == pytest.approx(0.04 + 0.2)


def test_a_prefix_is_not_fetched_at_the_threshold_itself():
    placement = place(world([prefill("b", hbm=400, fetchable=800)]), threshold=2)
    assert (placement.prefix_tokens, placement.fetch_tokens) == (400, 0)
    assert placement.ttft_s == pytest.approx(0.6)


def test_an_instance_without_any_prefix_has_an_infinite_ratio():
    placement = place(world([prefill("b", hbm=0, fetchable=10)]), threshold=1e9)
    assert placement.fetch_tokens == 10


def test_what_an_instance_cannot_fetch_does_not_count_as_the_best_prefix():
    placement = place(world([prefill("b", hbm=400, fetchable=800, fetch="none")]))
    assert placement.fetch_tokens == 0


def test_the_letter_is_kept_where_a_fetch_is_slower_than_computing():
    # From SSD at 1 ms a token, fetching costs what computing costs, and the flows that are there double it.
    scene = world([prefill("b", hbm=0, fetchable=500, fetch_ssd_tokens=500)])
    assert place(scene).ttft_s == pytest.approx(0.5 + 0.5)
    scene = world([prefill("b", hbm=0, fetchable=500, source_flows=29)])
    assert place(scene).ttft_s == pytest.approx(1.5 + 0.5)


def test_transfers_share_the_busier_end():
    scene = world([prefill("b", hbm=0, fetchable=500, source_flows=1, inbound_flows=3)])
    assert place(scene).transfer_s == pytest.approx(0.05 * 4)


def test_one_token_is_computed_even_where_all_is_held():
    placement = place(world([prefill("a", hbm=1_000)]))
    assert placement.prefix_tokens == 999
    assert placement.prefill_s == pytest.approx(0.001)


def test_ties_are_broken_by_chance_on_both_sides():
    scene = world([prefill("a"), prefill("b")], [decode("d0"), decode("d1")])
    pairs = {
        (placed.prefill.id, placed.decode.id)
        for numbers in [(0.1, 0.1), (0.1, 0.9), (0.9, 0.1), (0.9, 0.9)]
        for placed in [place(scene, chance=Script(*numbers))]
    }
    assert pairs == {("a", "d0"), ("a", "d1"), ("b", "d0"), ("b", "d1")}


def test_decode_goes_where_the_time_between_tokens_is_least():
    scene = world([prefill("a")], [decode("d0", 3, 3_000), decode("d1", 1, 90_000), decode("d2", 2, 2_000)])
    placement = place(scene)
    assert placement.decode.id == "d2"
    assert placement.tbt_s == pytest.approx(0.020 + 0.003 + (2_000 + 1_100) * 1e-6)


def test_decode_goes_where_the_kv_fits_before_it_goes_where_it_is_fast():
    scene = world(
        [prefill("a")],
        [
            decode("d0", 1, 9_500, kv_capacity_tokens=10_000),
            decode("d1", 8, 80_000, kv_capacity_tokens=100_000),
        ],
    )
    assert place(scene).decode.id == "d1"


def test_a_pair_is_of_one_revision_although_another_would_be_faster():
    scene = world(
        [prefill("a", revision="r2"), prefill("b", queued_s=5)],
        [decode("d0", 9, 9_000)],
    )
    placement = place(scene)
    assert (placement.prefill.id, placement.decode.id) == ("b", "d0")


def test_a_pair_is_of_one_topology_domain_where_both_name_one():
    scene = world(
        [prefill("a", topology_domain="x")],
        [decode("far", topology_domain="y"), decode("near", 9, 9_000, topology_domain="x")],
    )
    assert place(scene).decode.id == "near"
    scene = world([prefill("a", topology_domain="x")], [decode("anywhere")])
    assert place(scene).decode.id == "anywhere"


def test_an_instance_of_both_roles_keeps_what_it_prefilled():
    both = prefill("a", role=Role.BOTH, connector="")
    placement = place(world([both], [both]))
    assert placement.prefill is None
    assert placement.decode.id == "a"
    assert placement.ttft_s == pytest.approx(1.0)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    ("prefills", "decodes", "message"),
    [
        ([], [decode("d0")], "no prefill instance is ready"),
        ([prefill("a")], [], "no decode instance is ready"),
        ([prefill("a")], [decode("d0", revision="r2")], "one revision"),
        ([prefill("a")], [decode("d0", connector="NixlConnector")], "one connector"),
    ],
)
def test_where_nothing_can_be_placed_the_error_says_what_is_missing(name, prefills, decodes, message):
    with pytest.raises(NoInstanceError, match=message):
        create(name).place(ask(), world(prefills, decodes), Script())
