"""What must hold of every decision in every world."""

import random
from math import inf, isclose

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, Waiting
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_core.registry import Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import Ask, InstanceView, NoInstanceError, Placement, Slo, World
from mooncake_scheduler.conductor.placement import may_pair
from mooncake_scheduler.policies import create, names
from mooncake_testing.worlds import instance

COSTS = CostModels(default=CostModel.from_profile(LLAMA3_70B_A800))
NOW_S = 50.0
TIE_WINDOW = 0.005

few = settings(max_examples=60, deadline=None)
tokens = st.integers(0, 60_000)
policy_names = st.sampled_from(names())
seeds = st.integers(0, 2**16)
modes = st.sampled_from(AdmissionMode)


waits = st.builds(
    Waiting,
    st.floats(NOW_S - 40, NOW_S),
    st.integers(1, 9_000_000),
    st.just(inf) | st.floats(NOW_S - 5, NOW_S + 60),
)


@st.composite
def loads(draw):
    arriving = draw(
        st.lists(st.tuples(st.integers(480, 600), st.integers(1, 3), st.integers(1, 9_000)), max_size=4)
    )
    batch = draw(st.integers(0, 40))
    ends = draw(
        st.lists(st.tuples(st.integers(480, 900), st.integers(1, 5), st.integers(1, 9_000)), max_size=6)
    )
    queued = draw(st.integers(0, 5))
    waiting = draw(st.lists(waits, max_size=4)) if queued else []
    handed_over_s = draw(st.floats(0.001, 20)) if queued else 0.0
    return InstanceLoad(
        queued_s=handed_over_s + sum(each.cost_us for each in waiting) / 1e6,
        queued=queued + len(waiting),
        waiting=tuple(sorted(waiting)),
        batch=batch,
        arriving=sum(each[1] for each in arriving),
        kv_tokens=draw(st.integers(0, 1_500_000)) if batch or arriving else 0,
        prefill_ends=tuple(sorted(arriving)),
        decode_ends=tuple(sorted(ends)),
    )


@st.composite
def views(draw, role, index):
    role = draw(st.sampled_from([role, role, role, Role.BOTH]))
    held = draw(st.just(0) | tokens)
    return InstanceView(
        instance(
            f"{role}-{index}",
            role,
            revision=draw(st.sampled_from(["r1", "r1", "r2"])),
            topology_domain=draw(st.sampled_from(["", "x", "y"])),
            connector=draw(st.sampled_from(["MooncakeConnector", "MooncakeConnector", "NixlConnector", ""])),
            fetch=draw(st.sampled_from(["store", "none"])),
            kv_capacity_tokens=draw(st.sampled_from([0, 1_400_000])),
            max_batch=draw(st.sampled_from([0, 32])),
        ),
        draw(loads()),
        hbm_tokens=held,
        fetchable_tokens=held + draw(st.just(0) | tokens),
        fetch_ssd_tokens=draw(st.just(0) | tokens),
        inbound_flows=draw(st.integers(0, 4)),
        source_flows=draw(st.integers(0, 4)),
    )


@st.composite
def worlds(draw):
    prefills = [draw(views(Role.PREFILL, i)) for i in range(draw(st.integers(1, 5)))]
    decodes = [draw(views(Role.DECODE, i + 10)) for i in range(draw(st.integers(1, 5)))]
    both = [view for view in (*prefills, *decodes) if view.instance.role is Role.BOTH]
    return World(
        now_s=NOW_S,
        prefill=[*(view for view in prefills if view not in both), *both],
        decode=[*(view for view in decodes if view not in both), *both],
        cost=COSTS,
        slo=Slo(
            draw(st.none() | st.floats(0.1, 40)),
            draw(st.none() | st.floats(0.01, 0.2)),
        ),
        explain=draw(st.booleans()),
    )


asks = st.builds(
    Ask,
    id=st.just("q"),
    prompt_tokens=st.integers(1, 60_000),
    output_tokens=st.integers(1, 2_000),
    tenant=st.just("t"),
    priority=st.integers(-3, 3),
)


def conductor(name, seed, mode=AdmissionMode.PREDICTIVE, fared=(), *, holding=False, **settings_):
    admission = Admission(mode, holding=holding)
    placer = Conductor(create(name, **settings_), admission, COSTS, random.Random(seed))
    for need_tokens, wait_s, found in fared:
        placer.waits.observe(need_tokens, wait_s, NOW_S, found=found)
    return placer


def decide(name, seed, ask, world, mode=AdmissionMode.PREDICTIVE, **settings_):
    """The answer; None where nothing can be placed."""
    try:
        return conductor(name, seed, mode, **settings_).decide(ask, world)
    except NoInstanceError:
        return None


def with_room_to_decode(world):
    """Where decode has none `kv-centric` walks further for one that has."""

    def roomy(view):
        return structs.replace(view, load=InstanceLoad(queued_s=view.load.queued_s, queued=view.load.queued))

    return structs.replace(
        world, prefill=[roomy(view) for view in world.prefill], decode=[roomy(view) for view in world.decode]
    )


def place(name, seed, ask, world, **settings_):
    return decide(name, seed, ask, world, AdmissionMode.NONE, **settings_)


@few
@given(worlds(), asks, policy_names, seeds, modes)
def test_the_same_inputs_and_chance_give_the_same_decision(world, ask, name, seed, mode):
    assert decide(name, seed, ask, world, mode) == decide(name, seed, ask, world, mode)


@few
@given(worlds(), asks, policy_names, seeds)
def test_a_pair_may_always_work_together_and_predicts_sane_numbers(world, ask, name, seed):
    placement = place(name, seed, ask, world, disaggregation_threshold_tokens=2_048)
    if placement is None:
        assert not any(may_pair(p.instance, d.instance) for p in world.prefill for d in world.decode)
        return
    if placement.prefill is not None:
        assert placement.prefill.id != placement.decode.id
        assert placement.prefill.revision == placement.decode.revision
        assert placement.prefill.connector == placement.decode.connector
        if Role.BOTH in (placement.prefill.role, placement.decode.role):
            assert placement.decode.connector
        domains = {placement.prefill.topology_domain, placement.decode.topology_domain} - {""}
        assert len(domains) <= 1
    assert 0 <= placement.fetch_tokens <= placement.prefix_tokens < ask.prompt_tokens
    assert min(placement.queue_s, placement.transfer_s) >= 0
    assert min(placement.prefill_s, placement.tbt_s) > 0
    assert isclose(placement.ttft_s, placement.queue_s + placement.transfer_s + placement.prefill_s)


@few
@given(worlds(), asks, seeds)
def test_algorithm_1_takes_the_least_ttft_of_those_that_have_a_partner(world, ask, seed):
    world = structs.replace(world, explain=True)
    placement = place("algorithm-1", seed, ask, world)
    if placement is None:
        return
    can = {
        p.instance.id
        for p in world.prefill
        if p.instance.role is Role.BOTH or any(may_pair(p.instance, d.instance) for d in world.decode)
    }
    assert len(placement.considered) == len(world.prefill)
    assert placement.ttft_s == min(each.ttft_s for each in placement.considered if each.instance in can)


@few
@given(worlds(), asks, seeds)
def test_kv_centric_is_never_predicted_to_be_worse_than_algorithm_1(world, ask, seed):
    world = with_room_to_decode(world)
    ours = place("kv-centric", seed, ask, world, disaggregation_threshold_tokens=2_048)
    paper = place("algorithm-1", seed, ask, world)
    if paper is not None:
        assert ours.ttft_s <= paper.ttft_s * (1 + TIE_WINDOW) + 1e-12


@few
@given(worlds(), asks, st.sampled_from(["algorithm-1", "cache-aware", "kv-centric"]), seeds, st.randoms())
def test_the_order_of_instances_does_not_matter_up_to_ties(world, ask, name, seed, shuffle):
    shuffled = structs.replace(
        world,
        prefill=shuffle.sample(world.prefill, len(world.prefill)),
        decode=shuffle.sample(world.decode, len(world.decode)),
    )
    settings_ = {"tie_window": 0.0} if name == "kv-centric" else {}
    one, other = place(name, seed, ask, world, **settings_), place(name, seed, ask, shuffled, **settings_)
    if one is None:
        assert other is None
        return
    assert one.ttft_s == other.ttft_s


@few
@given(worlds(), asks, policy_names, seeds, modes, st.floats(0.05, 1), st.floats(0.05, 1))
def test_a_tighter_target_never_turns_a_refusal_into_an_admission(world, ask, name, seed, mode, by, tbt_by):
    slo = world.slo
    tighter = structs.replace(
        world,
        slo=Slo(
            None if slo.ttft_s is None else slo.ttft_s * by, None if slo.tbt_s is None else slo.tbt_s * tbt_by
        ),
    )
    options = {"disaggregation_threshold_tokens": 2_048}
    loose, tight = (decide(name, seed, ask, each, mode, **options) for each in (world, tighter))
    if isinstance(tight, Placement):
        assert isinstance(loose, Placement)


@few
@given(
    worlds(),
    asks,
    seeds,
    st.lists(st.tuples(st.integers(1, 60_000), st.floats(0, 40), st.booleans()), max_size=80),
    st.floats(0.05, 1),
    st.floats(0.05, 1),
)
def test_nor_does_it_where_prefilled_requests_wait_for_a_place(world, ask, seed, fared, by, tbt_by):
    slo = world.slo
    tight = Slo(
        None if slo.ttft_s is None else slo.ttft_s * by, None if slo.tbt_s is None else slo.tbt_s * tbt_by
    )
    options = {"fared": fared, "holding": True}
    if isinstance(decide("kv-centric", seed, ask, structs.replace(world, slo=tight), **options), Placement):
        assert isinstance(decide("kv-centric", seed, ask, world, **options), Placement)


@few
@given(worlds(), asks, policy_names, seeds)
def test_mode_none_never_refuses(world, ask, name, seed):
    answer = place(name, seed, ask, world)
    assert answer is None or isinstance(answer, Placement)


@few
@given(worlds(), asks, policy_names, seeds, modes)
def test_an_idle_world_never_refuses(world, ask, name, seed, mode):
    def idle(view):
        return structs.replace(view, load=InstanceLoad())

    world = structs.replace(
        world, prefill=[idle(view) for view in world.prefill], decode=[idle(view) for view in world.decode]
    )
    answer = decide(name, seed, ask, world, mode)
    assert answer is None or isinstance(answer, Placement)


@few
@given(worlds(), asks, st.sampled_from(["algorithm-1", "cache-aware", "kv-centric"]), seeds)
def test_another_idle_instance_never_makes_the_predicted_ttft_worse(world, ask, name, seed):
    world = with_room_to_decode(world)
    before = place(name, seed, ask, world)
    if before is None:
        return
    like = before.prefill or before.decode
    more = InstanceView(msgspec.structs.replace(like, id="new"), InstanceLoad())
    after = place(name, seed, ask, structs.replace(world, prefill=[*world.prefill, more]))
    assert after.ttft_s <= before.ttft_s * (1 + TIE_WINDOW) + 1e-12


@few
@given(worlds(), asks, policy_names, seeds, modes)
def test_limits_let_through_what_was_just_admitted(world, ask, name, seed, mode):
    placer = conductor(name, seed, mode)
    try:
        answer = placer.decide(ask, world)
    except NoInstanceError:
        return
    if not isinstance(answer, Placement):
        return
    limits = placer.limits(ask, answer, world)
    everyone = {view.instance.id: view.load for view in (*world.prefill, *world.decode)}
    prefill_load = everyone[(answer.prefill or answer.decode).id]
    decode_load = everyone[answer.decode.id]
    assert prefill_load.queued_s + answer.prefill_s <= limits.queued_s + 1e-6
    assert limits.batch == 0 or decode_load.batch + decode_load.arriving + 1 <= limits.batch
    need = ask.prompt_tokens + ask.output_tokens
    assert limits.kv_tokens == 0 or decode_load.kv_tokens + need <= limits.kv_tokens


@few
@given(worlds(), asks, policy_names, seeds, modes)
def test_a_refusal_says_when_to_come_back(world, ask, name, seed, mode):
    answer = decide(name, seed, ask, world, mode)
    if answer is not None and not isinstance(answer, Placement):
        assert 0 < answer.retry_after_s < inf
        assert answer.placement is not None
