"""Instances that fail, nodes that go, pools that are deleted, Pods of others."""

from dataclasses import replace

import msgspec
import pytest

from mooncake_core.api.status import MAX_INSTANCES_LISTED
from mooncake_core.registry import InstanceState, Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import (
    AddFinalizer,
    CreatePod,
    DeletePod,
    MarkDrain,
    RemoveFinalizer,
    SetGate,
    Unmark,
)
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.instances import LOST_AFTER_S, Phase, assemble
from mooncake_operator.planning.observed import Observed, ObservedPod, Registration, Trouble
from mooncake_operator.planning.plan import plan
from mooncake_operator.planning.preview import carry_out, settle
from mooncake_operator.planning.reading import pool_history
from mooncake_operator.planning.recreation import delay_s
from mooncake_operator.planning.statuses import pool_status

DRAIN_S = 600


def pool(name="p", role=Role.PREFILL, replicas=3, **fields):
    return DesiredPool(
        name, f"uid-{name}", role, replicas, "r1", pairing="g1", drain_timeout_s=DRAIN_S, **fields
    )


def at_rest(*pools, **fields):
    cluster = DesiredCluster(pools or (pool(),), **fields)
    observed = Observed(1000.0, registry={})
    for _ in range(6):
        observed = settle(carry_out(cluster, observed, plan(cluster, observed)))
    assert plan(cluster, observed).actions == ()
    return cluster, observed


def put(observed, name, **fields):
    return replace(observed, pods=tuple(replace(p, **fields) if p.name == name else p for p in observed.pods))


def without(observed, *names):
    return replace(observed, pods=tuple(p for p in observed.pods if p.name not in names))


def work(observed, instance, **fields):
    registry = {**observed.registry, instance: replace(observed.registry[instance], **fields)}
    return replace(observed, registry=registry)


def of(made, kind):
    return [action for action in made.actions if isinstance(action, kind)]


def change(cluster, **fields):
    return replace(cluster, pools=tuple(replace(p, **fields) for p in cluster.pools))


def failed(observed, name, reason="Evicted", message="low on memory"):
    return put(observed, name, phase="Failed", containers_ready=False, ending=Trouble(reason, message))


def test_a_failure_is_on_record_before_its_pods_are_deleted():
    cluster, observed = at_rest()
    observed = failed(observed, "p-p-1")
    first = plan(cluster, observed)
    assert first.actions == ()
    assert "Evicted: low on memory" in first.outcomes["p"].recreations[0].message
    observed = carry_out(cluster, observed, first)
    (deleted,) = plan(cluster, observed).actions
    assert (deleted.pod, deleted.reason) == ("p-p-1", reasons.INSTANCE_FAILED)


def test_a_terminal_pod_is_removed_and_comes_back_under_its_name_at_once_the_first_time():
    cluster, observed = at_rest()
    observed = carry_out(cluster, failed(observed, "p-p-1"), plan(cluster, failed(observed, "p-p-1")))
    observed = carry_out(cluster, observed, plan(cluster, observed))
    assert of(plan(cluster, observed), CreatePod) == []
    gone = without(observed, "p-p-1")
    (made,) = of(plan(cluster, gone), CreatePod)
    assert made.pod == "p-p-1"


def test_repeated_failures_wait_longer_each_time_and_say_so():
    cluster, observed = at_rest()
    waits = []
    for _ in range(7):
        observed = failed(observed, "p-p-0", "Error", "exit code 1")
        observed = carry_out(cluster, observed, plan(cluster, observed))
        failed_at_s = observed.now_s
        observed = without(carry_out(cluster, observed, plan(cluster, observed)), "p-p-0")
        made = plan(cluster, observed)
        if not of(made, CreatePod):
            (until_s,) = [w.until_s for w in made.waits if w.reason == reasons.BACKING_OFF]
            observed = replace(observed, now_s=until_s - 1)
            assert of(plan(cluster, observed), CreatePod) == []
            observed = replace(observed, now_s=until_s)
            made = plan(cluster, observed)
        waits.append(observed.now_s - failed_at_s)
        observed = carry_out(cluster, observed, made)
    assert waits == [0, 30, 60, 120, 240, 480, 600]
    history = observed.history("p")
    assert history.recreations[0].failures == 7
    assert len(history.last_failures) == 5


def test_a_stable_time_makes_failures_forgotten():
    cluster, observed = at_rest()
    for _ in range(2):
        observed = failed(observed, "p-p-0")
        for _ in range(4):
            observed = settle(carry_out(cluster, observed, plan(cluster, observed)))
    assert observed.history("p").recreations
    later = replace(observed, now_s=observed.now_s + 700)
    assert plan(cluster, later).outcomes["p"].recreations == ()
    assert delay_s(1) == 0


def test_a_failing_instance_is_not_replaced_by_another_meanwhile():
    cluster, observed = at_rest()
    observed = carry_out(cluster, failed(observed, "p-p-1"), plan(cluster, failed(observed, "p-p-1")))
    observed = carry_out(cluster, observed, plan(cluster, observed))
    assert [i.phase for i in assemble(cluster.pools[0], observed)][1] is Phase.RECREATING
    assert of(plan(cluster, observed), CreatePod) == []


def test_an_evicted_instance_is_replaced_while_it_still_ends():
    cluster, observed = at_rest()
    observed = put(observed, "p-p-1", deleted_s=observed.now_s + DRAIN_S)
    (made,) = of(plan(cluster, observed), CreatePod)
    assert made.pod == "p-p-3"


def test_gpus_of_a_pod_on_a_dead_node_are_given_away_only_after_a_limit():
    cluster, observed = at_rest(pool(gpus_per_pod=8), gpu_budget=24)
    observed = put(observed, "p-p-1", deleted_s=observed.now_s, containers_ready=False)
    held = plan(cluster, observed)
    assert of(held, CreatePod) == []
    assert any(wait.reason == reasons.GPU_BUDGET for wait in held.waits)
    assert held.look_again_s == observed.now_s + LOST_AFTER_S
    later = replace(observed, now_s=observed.now_s + LOST_AFTER_S)
    (made,) = of(plan(cluster, later), CreatePod)
    assert made.pod == "p-p-3"


def test_an_instance_of_two_pods_is_made_leader_first_and_lives_and_dies_as_a_whole():
    cluster = DesiredCluster((pool(size=2, replicas=1),))
    observed = Observed(0.0, registry={})
    made = plan(cluster, observed)
    assert [a.pod for a in of(made, CreatePod)] == ["p-p-0"]
    observed = carry_out(cluster, observed, made)
    (worker,) = of(plan(cluster, observed), CreatePod)
    assert (worker.pod, worker.rank, worker.leader_uid) == ("p-p-0-w1", 1, observed.pods[0].uid)
    for _ in range(3):
        observed = settle(carry_out(cluster, observed, plan(cluster, observed)))
    (instance,) = assemble(cluster.pools[0], observed)
    assert instance.routable
    crashed = put(observed, "p-p-0-w1", engine_restarts=1)
    crashed = carry_out(cluster, crashed, plan(cluster, crashed))
    assert {a.pod for a in of(plan(cluster, crashed), DeletePod)} == {"p-p-0", "p-p-0-w1"}


@pytest.mark.parametrize("lost", ["p-p-0", "p-p-0-w1"])
def test_an_instance_that_loses_a_rank_is_recreated_as_a_whole(lost):
    cluster, observed = at_rest(pool(size=2, replicas=1))
    observed = without(observed, lost)
    observed = carry_out(cluster, observed, plan(cluster, observed))
    (deleted,) = of(plan(cluster, observed), DeletePod)
    assert deleted.pod != lost
    for _ in range(4):
        observed = settle(carry_out(cluster, observed, plan(cluster, observed)))
    (instance,) = assemble(cluster.pools[0], observed)
    assert instance.routable
    assert len(instance.pods) == 2


@pytest.mark.parametrize("new_size", [1, 3])
def test_an_old_instance_is_whole_in_its_own_size_and_comes_back_in_it(new_size):
    cluster, observed = at_rest(pool(size=2, replicas=2, gpus_per_pod=8))
    held = change(cluster, size=new_size, revision="r2", paused=True)
    observed = carry_out(held, observed, plan(held, observed))
    assert all(i.routable for i in assemble(held.pools[0], observed)), "another size is no failure"
    observed = failed(observed, "p-p-1-w1")
    for _ in range(5):
        observed = settle(carry_out(held, observed, plan(held, observed)))
    again = assemble(held.pools[0], observed)
    assert [(i.name, i.revision, len(i.pods)) for i in again] == [("p-p-0", "r1", 2), ("p-p-1", "r1", 2)]
    assert [i.gpus for i in again] == [16, 16]


def test_what_is_missing_of_an_instance_counts_against_the_budget():
    cluster, observed = at_rest(pool(size=4, replicas=2, gpus_per_pod=1, max_surge=1), gpu_budget=8)
    observed = failed(observed, "p-p-0-w2")
    for _ in range(2):
        observed = carry_out(cluster, observed, plan(cluster, observed))
    observed = without(observed, "p-p-0-w1", "p-p-0-w2", "p-p-0-w3")
    (broken, _) = assemble(cluster.pools[0], observed)
    assert (broken.phase, broken.gpus) == (Phase.RECREATING, 4)
    assert of(plan(change(cluster, revision="r2"), observed), CreatePod) == []


def test_a_workers_name_in_other_hands_makes_the_instances_number_unusable():
    foreign = ObservedPod("p-p-1-w1", "x", "", "", "p-p-1-w1", phase="Running")
    cluster = DesiredCluster((pool(size=2, replicas=2),))
    made = plan(cluster, Observed(0.0, pods=(foreign,), registry={}))
    assert [action.pod for action in of(made, CreatePod)] == ["p-p-0", "p-p-2"]


def test_scale_down_takes_those_with_least_work_and_waits_for_them():
    cluster, observed = at_rest()
    observed = work(observed, "p-p-2", in_flight=9)
    observed = work(observed, "p-p-0", in_flight=2)
    observed = work(observed, "p-p-1", in_flight=4)
    two = change(cluster, replicas=2)
    made = plan(two, observed)
    assert [(a.pod, a.reason) for a in of(made, SetGate)] == [("p-p-0", reasons.DRAINING)]
    assert [a.instance for a in of(made, MarkDrain)] == ["p-p-0"]
    observed = carry_out(two, observed, made)
    observed = work(observed, "p-p-0", in_flight=1)
    assert plan(two, observed).actions == ()
    (deleted,) = plan(two, work(observed, "p-p-0", in_flight=0)).actions
    assert deleted.pod == "p-p-0"


def test_scaling_down_in_a_rollout_keeps_the_one_that_works_rather_than_new_ones_that_do_not_yet():
    prefill, decode = pool(replicas=1, max_surge=0), pool("d", Role.DECODE, 3, max_surge=0)
    cluster, observed = at_rest(prefill, decode)

    def with_prefill(**fields):
        return replace(cluster, pools=(replace(prefill, revision="r2", **fields), decode))

    more = with_prefill(replicas=4)
    observed = carry_out(more, observed, plan(more, observed))
    fewer = with_prefill(replicas=1)
    going = {a.pod for a in of(plan(fewer, observed), DeletePod)}
    going |= {a.pod for a in of(plan(fewer, observed), SetGate)}
    assert going == {"p-p-1", "p-p-2", "p-p-3"}, "p-p-0 is the only one that decode can be paired with"


def test_a_drain_is_cut_at_its_deadline_even_while_schedulers_are_silent():
    cluster, observed = at_rest()
    two = change(cluster, replicas=2)
    observed = carry_out(two, work(observed, "p-p-2", in_flight=3), plan(two, observed))
    silent = replace(observed, registry=None, now_s=observed.now_s + DRAIN_S - 1)
    assert plan(two, silent).actions == ()
    (deleted,) = plan(two, replace(silent, now_s=silent.now_s + 1)).actions
    assert deleted.reason == reasons.DRAINING


def test_scaling_up_again_keeps_the_one_that_was_draining():
    cluster, observed = at_rest()
    two = change(cluster, replicas=2)
    observed = carry_out(two, observed, plan(two, observed))
    made = plan(cluster, observed)
    assert [type(action) for action in made.actions] == [Unmark, SetGate]
    assert plan(cluster, carry_out(cluster, observed, made)).actions == ()


def test_a_chosen_victim_stays_chosen_when_the_operator_dies_before_the_mark():
    cluster, observed = at_rest()
    two = change(cluster, replicas=2)
    made = plan(two, observed)
    half = carry_out(two, observed, replace(made, actions=made.actions[:1]))
    assert half.registry["p-p-2"].state is InstanceState.READY
    again = plan(two, half)
    assert [a.instance for a in of(again, MarkDrain)] == ["p-p-2"]
    assert of(again, SetGate) == []


def test_silence_of_schedulers_and_a_registry_without_memory_change_no_gate():
    cluster, observed = at_rest()
    for registry in (None, {}):
        assert plan(cluster, replace(observed, registry=registry)).actions == ()


def test_a_goodbye_and_a_drain_by_hand_close_the_gate():
    cluster, observed = at_rest()
    by_hand = plan(cluster, work(observed, "p-p-0", state=InstanceState.DRAINING))
    assert [(a.pod, a.status, a.reason) for a in of(by_hand, SetGate)] == [
        ("p-p-0", False, reasons.MARKED_BY_USER)
    ]
    registry = {name: r for name, r in observed.registry.items() if name != "p-p-0"}
    ended = put(observed, "p-p-0", containers_ready=False, containers_ended=True)
    left = replace(ended, registry=registry)
    assert [(a.pod, a.status) for a in of(plan(cluster, left), SetGate)] == [("p-p-0", False)]


def test_a_late_probe_closes_no_gate_while_a_new_redis_knows_nobody_yet():
    cluster, observed = at_rest()
    late = put(observed, "p-p-0", containers_ready=False)
    for registry in (None, {}, {"p-p-1": observed.registry["p-p-1"]}):
        assert of(plan(cluster, replace(late, registry=registry)), SetGate) == []


def test_foreign_pods_are_neither_counted_nor_touched_and_their_names_are_avoided():
    stranger = ObservedPod("p-p-0", "x", "uid-of-a-job", "p", "p-p-0", phase="Failed")
    cluster = DesiredCluster((pool(replicas=2),))
    observed = Observed(0.0, pods=(stranger,), registry={})
    made = plan(cluster, observed)
    assert [a.pod for a in of(made, CreatePod)] == ["p-p-1", "p-p-2"]
    for _ in range(5):
        observed = settle(carry_out(cluster, observed, plan(cluster, observed)))
        assert not any(a.uid == "x" for a in of(plan(cluster, observed), DeletePod))
    assert [i.name for i in assemble(cluster.pools[0], observed)] == ["p-p-1", "p-p-2"]


def test_pods_of_an_earlier_pool_of_the_same_name_are_foreign():
    cluster, observed = at_rest()
    reborn = change(cluster, uid="uid-of-the-next")
    made = plan(reborn, observed)
    assert of(made, DeletePod) == []
    assert [a.pod for a in of(made, CreatePod)] == ["p-p-3", "p-p-4", "p-p-5"]


def test_the_finalizer_comes_before_the_first_pod():
    cluster = DesiredCluster((pool(has_finalizer=False),))
    first, *rest = plan(cluster, Observed(0.0, registry={})).actions
    assert first == AddFinalizer("p")
    assert of(replace(plan(cluster, Observed(0.0, registry={})), actions=tuple(rest)), CreatePod)


def test_a_deleted_pool_is_drained_makes_nothing_and_is_let_go_when_empty():
    cluster, observed = at_rest()
    observed = work(observed, "p-p-0", in_flight=2)
    gone = change(cluster, deleted_s=observed.now_s)
    made = plan(gone, observed)
    assert {a.instance for a in of(made, MarkDrain)} == {"p-p-0", "p-p-1", "p-p-2"}
    observed = carry_out(gone, observed, made)
    made = plan(gone, observed)
    assert {a.instance for a in of(made, DeletePod)} == {"p-p-1", "p-p-2"}
    observed = without(carry_out(gone, observed, made), "p-p-1", "p-p-2")
    observed = work(observed, "p-p-0", in_flight=0)
    observed = without(carry_out(gone, observed, plan(gone, observed)), "p-p-0")
    assert plan(gone, observed).actions == (RemoveFinalizer("p", "all its instances are gone"),)


def test_a_deleted_pool_whose_pods_never_end_is_let_go_at_the_deadline():
    cluster, observed = at_rest()
    gone = change(cluster, deleted_s=observed.now_s)
    observed = work(observed, "p-p-0", in_flight=1)
    for _ in range(3):
        observed = carry_out(gone, observed, plan(gone, observed))
    late = replace(observed, now_s=observed.now_s + DRAIN_S + 60)
    assert any(isinstance(a, RemoveFinalizer) for a in plan(gone, late).actions)
    assert "p-p-0" in of(plan(gone, late), RemoveFinalizer)[0].reason


def test_without_schedulers_a_deleted_pool_waits_for_nobody():
    cluster, observed = at_rest()
    gone = change(cluster, deleted_s=observed.now_s)
    made = plan(gone, replace(observed, registry=None))
    assert len(of(made, DeletePod)) == 3


def test_in_a_namespace_that_ends_nothing_is_made_and_finalizers_go_at_once():
    cluster, observed = at_rest()
    ends = replace(without(observed, "p-p-0"), namespace_terminating=True)
    assert plan(cluster, ends).actions == ()
    gone = change(cluster, deleted_s=observed.now_s)
    (action,) = plan(gone, ends).actions
    assert isinstance(action, RemoveFinalizer)


def test_a_store_grows_one_node_at_a_time_and_each_has_time_to_fill():
    store = pool("kv", Role.STORE, 2, max_surge=0, join_interval_s=60)
    cluster, observed = at_rest(store)
    four = change(cluster, replicas=4)
    later = replace(observed, now_s=observed.now_s + 100)
    made = plan(four, later)
    assert [a.pod for a in of(made, CreatePod)] == ["kv-kv-2"]
    after = replace(settle(carry_out(four, later, made)), now_s=later.now_s + 59)
    held = plan(four, after)
    assert of(held, CreatePod) == []
    assert held.look_again_s == later.now_s + 60
    made = plan(four, replace(after, now_s=later.now_s + 60))
    assert [a.pod for a in of(made, CreatePod)] == ["kv-kv-3"]


def test_registration_alone_opens_the_gate_and_only_when_containers_are_ready():
    cluster = DesiredCluster((pool(replicas=1),))
    observed = Observed(0.0, registry={})
    observed = carry_out(cluster, observed, plan(cluster, observed))
    early = replace(observed, registry={"p-p-0": Registration(InstanceState.READY)})
    assert of(plan(cluster, early), SetGate) == []
    silent = put(observed, "p-p-0", containers_ready=True, phase="Running")
    assert of(plan(cluster, silent), SetGate) == []
    both = replace(silent, registry=early.registry)
    assert [a.status for a in of(plan(cluster, both), SetGate)] == [True]


def test_more_instances_than_a_status_lists_fail_at_once_and_are_all_made_again():
    cluster, observed = at_rest(pool(replicas=2 * MAX_INSTANCES_LISTED))
    why = Trouble("Error", "x" * 1024)
    failed = tuple(replace(p, phase="Failed", containers_ready=False, ending=why) for p in observed.pods)
    observed = replace(observed, pods=failed, registry={})
    made = plan(cluster, observed)
    status = pool_status(made.outcomes["p"], observed)
    assert len(msgspec.json.encode(status)) < 256 * 1024
    # What the status does not hold is forgotten.
    after = replace(carry_out(cluster, observed, made), histories={"p": pool_history(status)})
    again = plan(cluster, after)
    assert len(of(again, DeletePod)) == 2 * MAX_INSTANCES_LISTED
    assert again.look_again_s > after.now_s
