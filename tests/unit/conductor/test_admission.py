"""Who is admitted, who is refused, why, and when it is worth coming back."""

import random

import pytest
from msgspec import structs

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, Limits, RefusalReason, Waiting
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import Placement, Refused
from mooncake_scheduler.policies import create, names
from mooncake_testing.worlds import ROUND_COSTS, ask, decode, prefill, world

ALL_BUSY = InstanceLoad(batch=50, kv_tokens=50_000, decode_ends=((20, 30, 30_000), (500, 20, 20_000)))


def conductor(mode="predictive", *, policy="algorithm-1", headroom=0.95, **more):
    return Conductor(
        create(policy), Admission(AdmissionMode(mode), headroom), CostModels(), random.Random(0), **more
    )


def decide(scene, mode="predictive", request=None, **more):
    return conductor(mode, **more).decide(request or ask(), scene)


def test_a_queue_longer_than_the_target_is_refused_until_it_has_drained():
    answer = decide(world([prefill("a", queued_s=3.5)], ttft_s=4.0))
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.TTFT
    assert answer.ttft_s == pytest.approx(4.5)
    assert answer.retry_after_s == pytest.approx(0.5)
    assert answer.placement.prefill.id == "a"


def test_a_prompt_that_can_never_meet_the_target_waits_for_an_idle_instance_and_no_longer():
    busy = decide(world([prefill("a", queued_s=2.0)], ttft_s=0.5))
    assert busy.retry_after_s == pytest.approx(2.0)
    assert isinstance(decide(world([prefill("a")], ttft_s=0.5)), Placement)


def test_without_targets_nothing_is_refused():
    assert isinstance(decide(world([prefill("a", queued_s=900)], [decode("d", load=ALL_BUSY)])), Placement)


def test_mode_none_never_refuses():
    scene = world(
        [prefill("a", queued_s=900)], [decode("d", load=ALL_BUSY, max_batch=1)], ttft_s=1, tbt_s=0.001
    )
    assert isinstance(decide(scene, "none"), Placement)
    answer = decide(scene, "none")
    assert conductor("none").limits(ask(), answer, scene) == Limits()


def test_a_cold_estimator_is_no_ground_for_a_refusal():
    cold = structs.replace(ROUND_COSTS, cold=True)
    scene = world(
        [prefill("a", queued_s=900)], [decode("d", load=ALL_BUSY)], costs=cold, ttft_s=1, tbt_s=0.001
    )
    assert isinstance(decide(scene), Placement)
    half = structs.replace(ROUND_COSTS, cold_prefill=True)
    scene = world([prefill("a", queued_s=1)], scene.decode, costs=half, ttft_s=0.5, tbt_s=0.001)
    answer = decide(scene)
    assert answer.reason is RefusalReason.TBT


class TestDecodeLoad:
    """60 ms target: at headroom .95 a step may take 57 ms. 50 requests with 50 000 tokens take 120 ms."""

    def test_predictive_sees_that_requests_will_have_left(self):
        # Prefill ends at 3 s; 30 requests end in bucket 20: 20 ms + 21 + 21.1 = 62 ms > 57, but < 0.95 * 70.
        scene = world([prefill("a", queued_s=2)], [decode("d", load=ALL_BUSY)], tbt_s=0.070)
        assert isinstance(decide(scene), Placement)
        assert decide(scene, "early").reason is RefusalReason.TBT

    def test_predictive_sees_what_is_still_in_prefill_and_early_does_not(self):
        load = InstanceLoad(batch=1, arriving=40, kv_tokens=41_000, prefill_ends=((5, 40, 40_000),))
        scene = world([prefill("a")], [decode("d", load=load)], tbt_s=0.060)
        answer = decide(scene)
        assert answer.reason is RefusalReason.TBT
        assert answer.tbt_s == pytest.approx(0.020 + 0.042 + 0.0421)
        assert isinstance(decide(scene, "early"), Placement)

    def test_retry_after_is_when_enough_will_have_left(self):
        scene = world([prefill("a")], [decode("d", load=ALL_BUSY)], tbt_s=0.070)
        answer = decide(scene)
        # Bucket 20 is over at 2.1 s; a request that comes at 1.1 s arrives there then.
        assert answer.retry_after_s == pytest.approx(1.1)

    def test_a_full_batch_is_refused_whatever_the_targets(self):
        scene = world([prefill("a")], [decode("d", 8, 8_000, max_batch=8)])
        assert decide(scene).reason is RefusalReason.TBT

    def test_kv_memory_keeps_its_headroom_for_growth(self):
        def scene(kv_tokens):
            return world([prefill("a")], [decode("d", 2, kv_tokens, kv_capacity_tokens=10_000)])

        assert isinstance(decide(scene(9_500 - 1_100)), Placement)
        answer = decide(scene(9_500 - 1_099))
        assert answer.reason is RefusalReason.KV_MEMORY

    def test_kv_memory_counts_the_predicted_output(self):
        scene = world([prefill("a")], [decode("d", 2, 8_000, kv_capacity_tokens=10_000)])
        assert isinstance(decide(scene, request=ask(1_000, 400)), Placement)
        assert decide(scene, request=ask(1_000, 600)).reason is RefusalReason.KV_MEMORY

    def test_kv_memory_that_others_need_only_after_this_one_has_gone_is_free_for_it(self):
        # It lives from 1 s to some 3.4 s. A large one arrives at 2 s or at 5 s.
        def scene(bucket):
            load = InstanceLoad(
                batch=1,
                arriving=1,
                kv_tokens=9_300,
                prefill_ends=((bucket, 1, 9_000),),
                decode_ends=((90, 1, 9_000),),
            )
            return world([prefill("a")], [decode("d", load=load, kv_capacity_tokens=10_000)])

        assert isinstance(decide(scene(50)), Placement)
        assert decide(scene(20)).reason is RefusalReason.KV_MEMORY

    def test_an_idle_decode_instance_takes_whatever_comes(self):
        scene = world([prefill("a")], [decode("d", kv_capacity_tokens=500, max_batch=4)], tbt_s=0.001)
        assert isinstance(decide(scene), Placement)


class TestLimits:
    """What `reserve` checks again must let through what was just admitted, and stop the next one too many."""

    def test_the_queue_may_fill_the_target_less_the_transfer(self):
        scene = world([prefill("a", fetchable=500, queued_s=1)], ttft_s=4.0)
        c = conductor()
        placement = c.decide(ask(), scene)
        assert c.limits(ask(), placement, scene).queued_s == pytest.approx(4.0 - 0.05)

    def test_an_idle_instance_is_given_room_for_a_prompt_beyond_the_target(self):
        scene = world([prefill("a")], [decode("d", kv_capacity_tokens=500)], ttft_s=0.5, tbt_s=0.001)
        c = conductor()
        limits = c.limits(ask(), c.decide(ask(), scene), scene)
        assert limits.queued_s >= 1.0
        assert limits.batch >= 1
        assert limits.kv_tokens >= 1_100

    def test_the_batch_may_grow_by_what_fits_when_the_request_arrives(self):
        # At arrival (1 s) 10 of 20 are left; 10 + n requests with 10 000 + 1 100 n tokens in 76 ms: n = 17.
        load = InstanceLoad(batch=20, kv_tokens=20_000, decode_ends=((3, 10, 10_000),))
        scene = world([prefill("a")], [decode("d", load=load)], tbt_s=0.080)
        c = conductor()
        assert c.limits(ask(), c.decide(ask(), scene), scene).batch == 20 + 17

    def test_kv_may_grow_by_what_will_be_free(self):
        load = InstanceLoad(batch=2, kv_tokens=9_000, decode_ends=((3, 1, 4_000),))
        scene = world([prefill("a")], [decode("d", load=load, kv_capacity_tokens=10_000)])
        c = conductor()
        assert c.limits(ask(), c.decide(ask(), scene), scene).kv_tokens == 9_500 + 4_000

    def test_unknown_bounds_stay_open(self):
        scene = world([prefill("a", queued_s=1)], [decode("d", 3, 3_000)])
        c = conductor()
        assert c.limits(ask(), c.decide(ask(), scene), scene) == Limits()


class TestWhoIsRefusedFirst:
    """A queue of 2.4 s and a prefill of 1 s fill 85 % of a target of 4 s."""

    SCENE = world([prefill("a", queued_s=2.4)], ttft_s=4.0)

    def test_low_priority_is_refused_before_the_limit_is_reached(self):
        assert isinstance(decide(self.SCENE, request=ask(priority=0)), Placement)
        assert isinstance(decide(self.SCENE, request=ask(priority=-1)), Placement)  # may fill 90 %
        assert decide(self.SCENE, request=ask(priority=-2)).reason is RefusalReason.TTFT  # may fill 80 %
        assert isinstance(decide(self.SCENE, request=ask(priority=-2), priority_floor=-2), Placement)

    def test_a_tenant_over_its_share_is_refused_before_the_others(self):
        c = conductor()
        for _ in range(9):
            c.observe_admitted(ask(tenant="greedy"), 0.0)
        c.observe_admitted(ask(tenant="modest"), 0.0)
        assert c.decide(ask(tenant="greedy"), self.SCENE).reason is RefusalReason.TENANT_QUOTA
        assert isinstance(c.decide(ask(tenant="modest"), self.SCENE), Placement)
        assert isinstance(c.decide(ask(tenant="new"), self.SCENE), Placement)

    def test_a_tenant_over_its_share_is_served_while_there_is_room(self):
        c = conductor()
        c.observe_admitted(ask(100_000, tenant="greedy"), 0.0)
        c.observe_admitted(ask(tenant="modest"), 0.0)
        assert isinstance(
            c.decide(ask(tenant="greedy"), world([prefill("a", queued_s=1)], ttft_s=4.0)), Placement
        )

    def test_a_tenant_alone_may_take_all(self):
        c = conductor()
        c.observe_admitted(ask(100_000, tenant="greedy"), 0.0)
        assert isinstance(c.decide(ask(tenant="greedy"), self.SCENE), Placement)

    def test_above_the_limit_the_reason_is_the_load_itself(self):
        c = conductor()
        c.observe_admitted(ask(100_000, tenant="greedy"), 0.0)
        c.observe_admitted(ask(tenant="modest"), 0.0)
        answer = c.decide(ask(tenant="greedy"), world([prefill("a", queued_s=9)], ttft_s=4.0))
        assert answer.reason is RefusalReason.TTFT


def test_a_policy_with_second_thoughts_is_asked_again_after_a_refusal():
    scene = world(
        [prefill("a", topology_domain="x"), prefill("b", queued_s=0.5, topology_domain="y")],
        [decode("dx", 90, 90_000, topology_domain="x"), decode("dy", topology_domain="y")],
        tbt_s=0.1,
    )
    placement = decide(scene, policy="kv-centric")
    assert (placement.prefill.id, placement.decode.id) == ("b", "dy")
    assert decide(scene, policy="algorithm-1").reason is RefusalReason.TBT


def test_a_refusal_tells_of_the_first_choice_when_all_are_refused():
    scene = world(
        [prefill("a", queued_s=5, topology_domain="x"), prefill("b", queued_s=9, topology_domain="y")],
        [decode("dx", topology_domain="x"), decode("dy", topology_domain="y")],
        ttft_s=2,
    )
    assert decide(scene, policy="kv-centric").ttft_s == pytest.approx(6.0)


def test_a_reservation_says_what_the_placement_takes():
    scene = world([prefill("a", queued_s=0.5)], now_s=100.0)
    c = conductor()
    placement = c.decide(ask(), scene)
    reservation = c.reservation(ask(), placement, 100.0)
    assert (reservation.prefill, reservation.decode, reservation.kv_tokens) == ("a", "d0", 1_100)
    assert reservation.prefill_cost_s == pytest.approx(1.0)
    assert reservation.prefill_end_s == pytest.approx(101.5)
    assert reservation.decode_end_s == pytest.approx(101.5 + 100 * placement.tbt_s)


def test_explain_keeps_all_candidates_and_is_off_otherwise():
    scene = world([prefill("a"), prefill("b")], [decode("d0"), decode("d1")])
    explained = decide(scene)
    assert {each.instance for each in explained.considered} == {"a", "b"}
    assert {each.instance for each in explained.considered_decode} == {"d0", "d1"}
    assert decide(structs.replace(scene, explain=False)).considered == ()


def test_costs_of_another_class_are_used_where_an_instance_names_it():
    fast = CostModel(b_s_per_token=1e-4)
    scene = structs.replace(
        world([prefill("a", pool="slow"), prefill("b", pool="slow", instance_class="fast", queued_s=0.5)]),
        cost=CostModels({"slow": ROUND_COSTS, "fast": fast}),
    )
    assert decide(scene).prefill.id == "b"


@pytest.mark.parametrize("policy", names())
def test_a_past_decision_is_explained_without_changing_the_next_one(policy):
    scene = world([prefill("a"), prefill("b", 500)], [decode("d0"), decode("d1", 3, 3_000)], explain=False)
    asked, silent = conductor(policy=policy), conductor(policy=policy)
    for _ in range(4):
        placement = asked.decide(ask(), scene)
        assert placement == silent.decide(ask(), scene)
        explained = asked.explain(ask(), scene, placement)
        assert [each.instance for each in explained.considered] == ["a", "b"]
        assert [each.instance for each in explained.considered_decode] == ["d0", "d1"]
        assert structs.replace(explained, considered=(), considered_decode=()) == placement


class TestBroughtForward:
    """Two of 0.9 s wait. One of 1 s ends after both, at 2.8 s; promised 2 s, between them, at 1.9."""

    QUEUE = structs.replace(
        prefill("a"),
        load=InstanceLoad(
            queued_s=1.8, queued=2, waiting=(Waiting(0.0, 900_000, 100.0), Waiting(0.0, 900_000, 101.0))
        ),
    )

    def decide(self, load, *, ttft_s, holding=False):
        scene = world([self.QUEUE], [decode("d", load=load, max_batch=50)], ttft_s=ttft_s)
        admission = Admission(AdmissionMode.PREDICTIVE, holding=holding)
        placer = Conductor(create("kv-centric"), admission, CostModels(), random.Random(0))
        return placer.decide(ask(), scene)

    def test_decode_is_judged_when_the_promise_brings_it_there(self):
        until_2_5_s = InstanceLoad(batch=50, kv_tokens=50_000, decode_ends=((24, 50, 50_000),))
        assert isinstance(self.decide(until_2_5_s, ttft_s=3.0), Placement)
        assert self.decide(until_2_5_s, ttft_s=2.0).reason is RefusalReason.TBT

    def test_a_tighter_promise_is_no_way_around_decode_that_is_full_later(self):
        from_2_2_s = InstanceLoad(arriving=50, kv_tokens=50_000, prefill_ends=((22, 50, 50_000),))
        assert self.decide(from_2_2_s, ttft_s=3.0).reason is RefusalReason.TBT
        assert self.decide(from_2_2_s, ttft_s=2.0).reason is RefusalReason.TBT

    def test_what_is_predicted_for_decode_is_of_the_same_moment_as_its_ttft(self):
        until_2_5_s = InstanceLoad(batch=30, kv_tokens=30_000, decode_ends=((24, 30, 30_000),))
        answer = self.decide(until_2_5_s, ttft_s=2.0)
        assert (answer.ttft_s, answer.promised_ttft_s) == (pytest.approx(1.9), 2.0)
        assert answer.arrival.batch == 30
        assert answer.tbt_s == pytest.approx(0.020 + 0.001 * 31 + 1e-6 * 31_100)

    def test_it_may_have_to_wait_for_its_place(self):
        until_1_95_s = InstanceLoad(batch=50, kv_tokens=50_000, decode_ends=((19, 50, 50_000),))
        answer = self.decide(until_1_95_s, ttft_s=2.0, holding=True)
        assert isinstance(answer, Placement)
        assert answer.arrival.batch == 50
