"""What the default policy does beyond Algorithm 1."""

import pytest

from mooncake_core.ledger import InstanceLoad
from mooncake_core.registry import Role
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import Script, ask, decode, prefill, world


def place(scene, chance=None, request=None, **settings):
    return create("kv-centric", **settings).place(request or ask(), scene, chance or Script())


def test_a_prefix_on_ssd_is_computed_again_where_that_is_faster():
    scene = world([prefill("a", hbm=0, fetchable=500, fetch_ssd_tokens=500, inbound_flows=0, queued_s=0.3)])
    assert place(scene).fetch_tokens == 500  # a tie: 1 ms a token either way; the copy is worth having
    scene = world([prefill("a", hbm=0, fetchable=500, source_flows=19)])
    placement = place(scene)
    assert placement.fetch_tokens == 0
    assert placement.ttft_s == pytest.approx(1.0)


def test_a_prefix_is_not_fetched_under_the_ratio_even_where_it_would_be_faster():
    assert place(world([prefill("a", hbm=700, fetchable=800)])).fetch_tokens == 0


def test_predictions_that_differ_by_less_than_the_window_are_ties():
    scene = world([prefill("a", queued_s=0.0), prefill("b", queued_s=0.004), prefill("c", queued_s=0.006)])
    assert place(scene, Script(0.0)).prefill.id == "a"
    assert place(scene, Script(0.99)).prefill.id == "b"
    assert place(scene, Script(0.99), tie_window=0.0).prefill.id == "a"


def test_among_tied_prefills_the_better_decode_side_decides():
    scene = world(
        [prefill("a", topology_domain="x"), prefill("b", topology_domain="y")],
        [decode("dx", 20, 20_000, topology_domain="x"), decode("dy", 2, 2_000, topology_domain="y")],
    )
    for number in (0.0, 0.99):
        placement = place(scene, Script(number))
        assert (placement.prefill.id, placement.decode.id) == ("b", "dy")


def test_a_domain_whose_decode_side_has_no_room_comes_last():
    scene = world(
        [prefill("a", topology_domain="x"), prefill("b", topology_domain="y", queued_s=3)],
        [
            decode("dx", 20, 20_000, topology_domain="x", max_batch=20),
            decode("dy", 2, 2_000, topology_domain="y", max_batch=20),
        ],
    )
    assert place(scene).decode.id == "dy"


def test_decode_is_chosen_by_its_load_when_the_request_arrives_there():
    # Ten requests leave d0 before the prefill ends in 1 s; d1 keeps its five.
    leaving = InstanceLoad(batch=10, kv_tokens=10_000, decode_ends=((5, 10, 10_000),))
    staying = InstanceLoad(batch=5, kv_tokens=5_000, decode_ends=((99, 5, 5_000),))
    placement = place(world([prefill("a")], [decode("d0", load=leaving), decode("d1", load=staying)]))
    assert placement.decode.id == "d0"
    assert placement.tbt_s == pytest.approx(0.020 + 0.001 + 1_100e-6)


def test_many_idle_decode_instances_fill_at_random():
    scene = world([prefill("a")], [decode(f"d{i}") for i in range(6)])
    firsts = {
        place(scene, Script(*numbers)).decode.id
        for numbers in [(0.9, 0.1), (0.1, 0.9, 0.5), (0.5, 0.9, 0.8, 0.1)]
    }
    assert len(firsts) > 1


class TestConditionalDisaggregation:
    def scene(self, *, rest=100, batch=0, tbt_s=None, queued_s=0.0, prefill_hbm=0):
        load = InstanceLoad(batch=batch, kv_tokens=1_000 * batch, queued_s=queued_s)
        return world(
            [prefill("a", hbm=prefill_hbm)], [decode("d0", load=load, hbm_tokens=1_000 - rest)], tbt_s=tbt_s
        )

    def test_a_decode_instance_prefills_a_short_rest_itself(self):
        placement = place(self.scene(), disaggregation_threshold_tokens=100)
        assert placement.prefill is None
        assert (placement.decode.id, placement.prefix_tokens) == ("d0", 900)
        assert placement.ttft_s == pytest.approx(0.1)

    def test_it_is_off_by_default(self):
        assert place(self.scene()).prefill.id == "a"

    def test_it_does_not_prefill_a_long_rest(self):
        assert place(self.scene(rest=101), disaggregation_threshold_tokens=100).prefill.id == "a"

    def test_it_does_not_where_a_prefill_instance_is_faster(self):
        scene = self.scene(queued_s=0.5, prefill_hbm=900)
        assert place(scene, disaggregation_threshold_tokens=100).prefill.id == "a"

    def test_it_does_not_where_its_batch_would_stall_beyond_the_target(self):
        busy = self.scene(batch=2, tbt_s=0.120)
        assert place(busy, disaggregation_threshold_tokens=100).prefill.id == "a"
        patient = self.scene(batch=2, tbt_s=0.130)
        assert place(patient, disaggregation_threshold_tokens=100).prefill is None

    def test_instances_of_both_roles_are_left_to_the_usual_choice(self):
        both = prefill("a", hbm=900, role=Role.BOTH)
        assert place(world([both], [both]), disaggregation_threshold_tokens=100).decode.id == "a"
