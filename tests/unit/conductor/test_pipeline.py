"""Instances whose prompts pass through stages, by numbers that can be worked out by hand."""

import random
from math import inf

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, Waiting
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import Computed, CostModel, CostModels
from mooncake_scheduler.conductor.model import InstanceView, Placement, Slo, World
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.placement import estimate_local, in_order
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import Script, ask, decode, instance, prefill

FOUR = CostModel(b_s_per_token=1e-3, stages=4, chunk_tokens=100)
ONE = CostModel(b_s_per_token=4e-3)
"""What one of the four Pods does alone."""


def flow_shop_s(stage_s: list[float], stages: int) -> float:
    """When the last stage is done with the last chunk: each waits for its turn at every stage."""
    free_s = [0.0] * stages
    for seconds in stage_s:
        at_s = 0.0
        for stage in range(stages):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + seconds
    return free_s[-1]


def world(*views, costs, now_s=0.0):
    return World(now_s, views, [decode("d0", instance_class="one")], CostModels(costs, default=ONE))


def test_the_last_chunk_passes_all_stages_and_the_next_prompt_begins_before():
    # Ten chunks of 0.1 s a stage: 1.0 s for the first, and 0.1 s more for each of three others.
    assert FOUR.occupied_s(1_000, 0) == pytest.approx(1.0)
    assert FOUR.prefill_s(1_000, 0) == pytest.approx(1.3)
    assert ONE.prefill_s(1_000, 0) == ONE.occupied_s(1_000, 0) == 4.0


def test_a_prompt_of_one_chunk_takes_as_long_as_on_a_single_node():
    assert FOUR.prefill_s(100, 0) == pytest.approx(ONE.prefill_s(100, 0))
    assert FOUR.prefill_s(1_000, 950) == pytest.approx(ONE.prefill_s(1_000, 950))


@pytest.mark.parametrize(("tokens", "cached"), [(2_048, 0), (100_000, 0), (131_072, 65_536), (4_096, 4_096)])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_it_is_what_stages_take_that_wait_for_each_other(tokens, cached, stages):
    model = CostModel.from_profile(LLAMA3_70B_A800.over(stages, tensor=8, pipeline=stages))
    cached = min(cached, tokens - 1)
    # Of equal chunks the last takes longest.
    starts = list(range(tokens, cached, -model.chunk_tokens))[::-1]
    ends = [*starts[:-1], tokens]
    begins = [cached, *ends[:-1]]
    stage_s = [
        model.b_s_per_token * (end - begin) + model.c_s_per_token2 * (end * end - begin * begin)
        for begin, end in zip(begins, ends, strict=True)
    ]
    assert model.prefill_s(tokens, cached) == pytest.approx(flow_shop_s(stage_s, stages))


def test_layers_that_pods_share_are_no_stages():
    assert LLAMA3_70B_A800.over(2, tensor=16).prefill_stages == 1
    assert LLAMA3_70B_A800.over(4, tensor=16, pipeline=2).prefill_stages == 2


def test_long_prompts_take_the_pipeline_and_short_ones_leave_it_to_them():
    # 0.5 s are queued before the pipeline. Short: 0.4 against 0.5 + 0.4 s; long: 4.0 against 0.5 + 1.3 s.
    scene = world(
        prefill("a", instance_class="one"),
        prefill("p", queued_s=0.5, instance_class="four"),
        costs={"four": FOUR},
    )
    policy = create("kv-centric")
    assert policy.place(ask(100), scene, Script()).prefill.id == "a"
    assert policy.place(ask(1_000), scene, Script()).prefill.id == "p"


def test_the_ledger_counts_how_long_the_first_stage_is_taken_and_the_promise_all_of_it():
    costs = CostModels({"four": FOUR}, default=ONE)
    conductor = Conductor(create("kv-centric"), Admission(AdmissionMode.NONE), costs, random.Random(0))
    scene = World(5.0, [prefill("p", instance_class="four")], [decode("d0")], costs)
    placement = conductor.decide(ask(1_000), scene)
    assert isinstance(placement, Placement)
    assert placement.ttft_s == pytest.approx(1.3)
    reservation = conductor.reservation(ask(1_000), placement, 5.0)
    assert reservation.prefill_cost_s == pytest.approx(1.0)
    assert reservation.prefill_end_s == pytest.approx(6.3)


def test_the_queue_may_fill_what_the_later_stages_leave_of_the_target():
    costs = CostModels({"four": FOUR}, default=ONE)
    admission = Admission(AdmissionMode.PREDICTIVE)
    conductor = Conductor(create("algorithm-1"), admission, costs, random.Random(0))
    scene = World(
        0.0, [prefill("p", queued_s=0.2, instance_class="four")], [decode("d0")], costs,
        Slo(ttft_s=2.0),
    )  # fmt: skip
    placement = conductor.decide(ask(1_000), scene)
    assert isinstance(placement, Placement)
    # 2.0 s less the 0.3 s after the first stage: so much may be queued with this one.
    assert conductor.limits(ask(1_000), placement, scene).queued_s == pytest.approx(1.7)


def test_a_prefill_seen_alone_is_learned_without_the_later_stages():
    costs = CostModels({"four": FOUR}, default=ONE)
    conductor = Conductor(create("kv-centric"), Admission(AdmissionMode.NONE), costs, random.Random(0))
    for tokens in (500, 1_000, 2_000, 4_000) * 8:
        seen = Computed(tokens, tokens * tokens, FOUR.prefill_s(tokens, 0), alone=True)
        conductor.observe_prefill("four", seen)
    learned = costs.of_class("four")
    assert learned.prefill_s(3_000, 0) == pytest.approx(FOUR.prefill_s(3_000, 0), rel=0.01)
    assert learned.occupied_s(3_000, 0) == pytest.approx(FOUR.occupied_s(3_000, 0), rel=0.01)


def test_where_turns_are_taken_a_promise_leaves_time_for_the_later_stages():
    costs = CostModels({"four": FOUR}, default=ONE)
    admission = Admission(AdmissionMode.PREDICTIVE)
    conductor = Conductor(create("kv-centric"), admission, costs, random.Random(0))
    scene = World(
        10.0, [prefill("p", queued_s=0.2, instance_class="four")], [decode("d0")], costs,
        Slo(ttft_s=2.0),
    )  # fmt: skip
    placement = conductor.decide(ask(1_000), scene)
    assert isinstance(placement, Placement)
    # The first stage has to be done with it 0.3 s before the two seconds are over.
    reservation = conductor.reservation(ask(1_000), placement, 10.0)
    assert reservation.latest_end_s == pytest.approx(10.0 + 2.0 - 0.3)
    # Its turn is at 0.2 s and takes 1.0: 0.5 s of others' work fit before it.
    assert conductor.limits(ask(1_000), placement, scene).queued_s == pytest.approx(1.7, abs=0.01)


def test_who_waits_at_a_pipeline_is_put_off_by_the_first_stage_alone():
    waiting = Waiting(0.0, 2_000_000, inf)
    load = InstanceLoad(queued_s=2.0, queued=1, waiting=(waiting,))
    view = InstanceView(instance("p", Role.PREFILL, instance_class="four"), load)
    estimate = estimate_local(ask(1_000), view, FOUR)
    # Shorter than the one that waits, so ahead of it: that one begins 1.0 s later, not 1.3.
    joined = in_order(estimate, QueueOrder(), 0.0, FOUR.drain_s(1_000, 0))
    assert joined.ttft_s == pytest.approx(1.3)
    assert joined.delay_s == pytest.approx(1.0)
