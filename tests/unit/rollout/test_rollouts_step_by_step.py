"""Worked examples: what a rollout does at each step."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from mooncake_core.api.coordination import PoolRatio
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import CreatePod, DeletePod, MarkDrain, RecordRevision, SetGate
from mooncake_operator.planning.instances import Phase, assemble
from mooncake_operator.planning.observed import Gate, Trouble
from mooncake_operator.planning.plan import plan
from mooncake_operator.planning.preview import carry_out, rollout_of, settle, steps


def counts(cluster, observed):
    """Pool → (old, new) routable."""
    return [(step.counts["prefill"], step.counts["decode"]) for step in steps(cluster, observed)]


def old_new(cluster, observed):
    return [((p["old"], p["new"]), (d["old"], d["new"])) for p, d in counts(cluster, observed)]


def created(made):
    return [action.instance for action in made.actions if isinstance(action, CreatePod)]


def drained(made):
    return [action.instance for action in made.actions if isinstance(action, MarkDrain)]


def change(cluster, **fields):
    return replace(cluster, pools=tuple(replace(pool, **fields) for pool in cluster.pools))


def of_pool(cluster, name, **fields):
    pools = tuple(replace(p, **fields) if p.name == name else p for p in cluster.pools)
    return replace(cluster, pools=pools)


def advance(cluster, observed, rounds=1):
    for _ in range(rounds):
        observed = settle(carry_out(cluster, observed, plan(cluster, observed)))
    return observed


def test_four_and_four_go_up_one_by_one_and_never_below_four():
    cluster, observed = rollout_of(prefill=4, decode=4, max_surge=1, max_unavailable=0)
    seen = old_new(cluster, observed)
    distinct = [seen[0], *(now for before, now in pairwise(seen) if now != before)]
    assert distinct == [
        ((4, 0), (4, 0)),
        ((4, 1), (4, 1)),
        ((3, 1), (3, 1)),
        ((3, 2), (3, 2)),
        ((2, 2), (2, 2)),
        ((2, 3), (2, 3)),
        ((1, 3), (1, 3)),
        ((1, 4), (1, 4)),
        ((0, 4), (0, 4)),
    ]
    assert all(sum(pool) >= 4 for now in seen for pool in now)


def test_with_no_gpu_to_spare_it_goes_down_first_by_one_of_each():
    cluster, observed = rollout_of(prefill=4, decode=4, max_surge=1, max_unavailable=1, gpus=8, gpu_budget=64)
    seen = list(steps(cluster, observed))
    assert max(step.gpus for step in seen) <= 64
    assert min(min(p["old"] + p["new"] for p in step.counts.values()) for step in seen) == 3
    assert seen[-1].counts == {
        "prefill": {"old": 0, "new": 4, "all": 4},
        "decode": {"old": 0, "new": 4, "all": 4},
    }


def test_one_spare_instance_is_shared_and_nothing_dips():
    cluster, observed = rollout_of(prefill=4, decode=4, max_unavailable=0, gpus=8, gpu_budget=72)
    seen = list(steps(cluster, observed))
    assert max(step.gpus for step in seen) == 72
    assert all(p["old"] + p["new"] >= 4 for step in seen for p in step.counts.values())
    assert all(p["new"] == 4 for p in seen[-1].counts.values())


def test_where_old_ones_go_first_the_pools_own_floor_counts_if_it_is_higher():
    cluster, observed = rollout_of(prefill=6, decode=6, max_surge=0, max_unavailable=4)
    wanted = replace(of_pool(cluster, "prefill", min_available=4), max_skew=1.0)
    seen = counts(wanted, observed)
    assert min(prefill["old"] + prefill["new"] for prefill, _ in seen) == 4
    assert min(decode["old"] + decode["new"] for _, decode in seen) == 2


@pytest.mark.parametrize(
    ("prefill", "decode", "unavailable", "skew"), [(8, 2, 1, 0.25), (8, 6, 2, 0.0), (8, 8, 3, 0.0)]
)
def test_nobody_is_taken_down_who_would_come_back_as_it_was(prefill, decode, unavailable, skew):
    cluster, observed = rollout_of(
        prefill=prefill, decode=decode, max_surge=0, max_unavailable=unavailable, max_skew=skew
    )
    revisions = []
    while made := plan(cluster, observed).actions:
        revisions += [action.revision for action in made if isinstance(action, CreatePod)]
        assert len(revisions) <= prefill + decode
        observed = advance(cluster, observed)
    assert revisions == ["new"] * (prefill + decode)


def test_neither_surge_nor_dip_means_a_rollout_that_says_what_it_lacks():
    cluster, observed = rollout_of(prefill=2, decode=2, max_unavailable=0, gpus=8, gpu_budget=32)
    *_, last = steps(cluster, observed)
    assert last.counts["prefill"]["new"] == 0
    assert any(
        "coordination.gpuBudget" in message and "update.maxUnavailable" in message
        for message in last.waits_for
    )


@pytest.mark.parametrize("numbers", [(8, 2), (2, 8), (6, 3)])
def test_pools_of_unequal_size_keep_their_shares_within_the_skew(numbers):
    prefill, decode = numbers
    cluster, observed = rollout_of(prefill=prefill, decode=decode, max_surge=2, max_unavailable=0)
    for step in steps(cluster, observed):
        shares = [
            step.counts["prefill"]["new"] / prefill,
            step.counts["decode"]["new"] / decode,
        ]
        one = max(1 / prefill, 1 / decode)
        assert abs(shares[0] - shares[1]) <= max(cluster.max_skew, one) + 1e-9
    assert shares == [1.0, 1.0]


def test_an_old_instance_stays_while_a_new_one_is_ready_but_unknown_to_the_schedulers():
    cluster, observed = rollout_of(prefill=2, decode=2, max_unavailable=0)
    after = settle(carry_out(cluster, observed, plan(cluster, observed)))
    known = {name: r for name, r in after.registry.items() if not name.endswith("-2")}
    after = replace(after, registry=known)
    for _ in range(5):
        made = plan(cluster, after)
        assert not drained(made)
        after = carry_out(cluster, after, made)
    assert {i.phase for i in assemble(cluster.pools[0], after)} == {Phase.ROUTABLE, Phase.READY}


def test_the_last_old_decode_stays_until_old_prefill_needs_no_partner():
    cluster, observed = rollout_of(prefill=4, decode=1, max_surge=1, max_unavailable=0)
    for prefill, decode in counts(cluster, observed):
        usable = (prefill["old"] if decode["old"] else 0) + (prefill["new"] if decode["new"] else 0)
        assert usable >= 4


def test_one_decode_without_surge_interrupts_but_ends():
    cluster, observed = rollout_of(prefill=4, decode=1, max_surge=0, max_unavailable=1)
    seen = counts(cluster, observed)
    assert seen[-1][0]["new"] == 4
    assert seen[-1][1]["new"] == 1
    assert min(p["old"] + p["new"] for p, _ in seen) >= 3


def test_pause_in_the_middle_holds_and_repairs_with_the_old_revision():
    cluster, observed = rollout_of(prefill=4, decode=4)
    observed = advance(cluster, observed, 7)
    paused = change(cluster, paused=True)
    rested = advance(paused, observed, 5)
    before = [(i.name, i.revision) for i in assemble(cluster.pools[0], rested)]
    assert {revision for _, revision in before} == {"old", "new"}
    assert advance(paused, rested, 5).pods == rested.pods
    old = next(i for i in assemble(cluster.pools[0], rested) if i.revision == "old")
    without = replace(rested, pods=tuple(p for p in rested.pods if p.instance != old.name))
    (made,) = [a for a in plan(paused, without).actions if isinstance(a, CreatePod)]
    assert made.revision == "old"
    *_, last = steps(cluster, rested)
    assert last.counts["prefill"] == {"old": 0, "new": 4, "all": 4}


def test_partition_keeps_so_many_old_ones_and_recreates_them_old():
    cluster, observed = rollout_of(prefill=4, decode=4, partition=3)
    *_, last = steps(cluster, observed)
    assert last.counts["prefill"] == {"old": 3, "new": 1, "all": 4}
    observed = advance(cluster, observed, 20)
    victim = next(i for i in assemble(cluster.pools[0], observed) if i.revision == "old")
    without = replace(observed, pods=tuple(p for p in observed.pods if p.instance != victim.name))
    (made,) = [a for a in plan(cluster, without).actions if isinstance(a, CreatePod)]
    assert made.revision == "old"


def test_undo_in_the_middle_keeps_the_floor_and_recalls_who_was_only_draining():
    cluster, observed = rollout_of(prefill=4, decode=4, max_unavailable=0)
    made = plan(cluster, observed)
    while not drained(made):
        observed = settle(carry_out(cluster, observed, made))
        made = plan(cluster, observed)
    observed = carry_out(cluster, observed, made)
    draining = {i.name for i in assemble(cluster.pools[0], observed) if i.phase is Phase.DRAINING}
    back = change(cluster, revision="old", pairing="old")
    undone = plan(back, observed)
    assert {a.pod for a in undone.actions if isinstance(a, SetGate) and a.status} >= draining
    assert not created(undone)
    seen = counts(back, carry_out(back, observed, undone))
    assert all(p["old"] + p["new"] >= 4 for pools in seen for p in pools)


def test_undo_in_the_middle_makes_nobody_in_the_place_of_one_that_is_still_ending():
    cluster, observed = rollout_of(prefill=4, decode=4, max_unavailable=0)
    made = plan(cluster, observed)
    while not any(isinstance(action, DeletePod) for action in made.actions):
        observed = settle(carry_out(cluster, observed, made))
        made = plan(cluster, observed)
    observed = carry_out(cluster, observed, made)
    back = change(cluster, revision="old", pairing="old")
    # It was of the revision that is wanted again, and holds its GPUs until it is gone.
    assert {i.phase for i in assemble(back.pools[0], observed)} == {Phase.ROUTABLE, Phase.ENDING}
    assert not created(plan(back, observed))
    *_, last = steps(back, observed)
    assert last.counts["prefill"] == {"old": 0, "new": 4, "all": 4}


def test_undo_in_the_middle_makes_nobody_in_the_place_of_a_surge_that_had_not_begun_to_work():
    cluster, observed = rollout_of(prefill=4, decode=4, max_unavailable=0)
    observed = carry_out(cluster, observed, plan(cluster, observed))
    back = change(cluster, revision="old", pairing="old")
    # Nothing was placed on it, so it is deleted without a drain; its Pod takes its time all the same.
    observed = carry_out(back, observed, plan(back, observed))
    # Meanwhile somebody takes one of the four away.
    gone = next(pod for pod in observed.pods if pod.deleted_s is None and pod.pool == "prefill")
    observed = replace(observed, pods=tuple(pod for pod in observed.pods if pod is not gone))
    assert Counter(i.phase for i in assemble(back.pools[0], observed)) == {Phase.ROUTABLE: 3, Phase.ENDING: 1}
    once = carry_out(back, observed, plan(back, observed))
    assert sum(pod.pool == "prefill" for pod in once.pods) == 5
    twice = carry_out(back, once, plan(back, once))
    assert sum(pod.pool == "prefill" for pod in twice.pods) == 5


@pytest.mark.parametrize("surge", [0, 1])
def test_what_was_scaled_down_and_still_ends_holds_its_place_when_it_is_scaled_up_again(surge):
    cluster, observed = rollout_of(prefill=4, decode=4, max_surge=surge)
    cluster = change(cluster, revision="old", pairing="old", replicas=1)
    observed = carry_out(cluster, observed, plan(cluster, observed))
    observed = replace(observed, now_s=observed.now_s + 10_000)  # the drain's time is over
    observed = carry_out(cluster, observed, plan(cluster, observed))
    assert Counter(i.phase for i in assemble(cluster.pools[0], observed)) == {
        Phase.ROUTABLE: 1,
        Phase.ENDING: 3,
    }
    again = change(cluster, replicas=4)
    assert len(created(plan(again, observed))) == 2 * surge
    *_, last = steps(again, observed)
    assert last.counts["prefill"] == {"old": 0, "new": 4, "all": 4}


def test_an_undo_numbers_the_revision_that_is_wanted_again_as_the_newest():
    cluster, observed = rollout_of(prefill=2, decode=2)
    observed = advance(cluster, observed, rounds=3)
    kept = {revision.number: revision.name for revision in observed.revisions if revision.pool == "decode"}
    assert sorted(kept) == [1, 2]
    undone = plan(change(cluster, revision=kept[1]), observed)
    again = [action for action in undone.actions if isinstance(action, RecordRevision)]
    assert RecordRevision("decode", kept[1], 3) in again
    observed = carry_out(change(cluster, revision=kept[1]), observed, undone)
    assert not any(
        isinstance(action, RecordRevision)
        for action in plan(change(cluster, revision=kept[1]), observed).actions
    )


def test_three_quick_edits_leave_every_pool_its_floor():
    cluster, observed = rollout_of(prefill=3, decode=3, max_unavailable=1)
    for revision in ("x", "y", "z"):
        cluster = change(cluster, revision=revision, pairing=revision)
        observed = advance(cluster, observed, 2)
        for pool in cluster.pools:
            assert sum(i.routable for i in assemble(pool, observed)) >= 2
    *_, last = steps(cluster, observed)
    assert last.counts["decode"] == {"old": 0, "new": 3, "all": 3}


def test_an_old_revision_that_never_works_is_replaced_without_waiting_for_it():
    cluster, observed = rollout_of(prefill=3, decode=3, max_unavailable=0)
    broken = tuple(replace(pod, containers_ready=False) for pod in observed.pods)
    observed = replace(observed, pods=broken, registry={})

    def only_new_start(picture):
        old = {pod.uid for pod in broken}
        settled = settle(picture)
        pods = tuple(replace(p, containers_ready=p.uid not in old) for p in settled.pods)
        ready = {p.instance for p in pods if p.containers_ready}
        registry = {name: r for name, r in settled.registry.items() if name in ready}
        return replace(settled, pods=pods, registry=registry)

    for _ in range(40):
        observed = only_new_start(carry_out(cluster, observed, plan(cluster, observed)))
    for pool in cluster.pools:
        assert [i.updated for i in assemble(pool, observed)] == [True, True, True]


def test_a_surge_that_finds_no_node_makes_room_for_itself_within_max_unavailable():
    cluster, observed = rollout_of(prefill=2, decode=2, max_surge=1, max_unavailable=1)
    observed = carry_out(cluster, observed, plan(cluster, observed))
    no_node = Trouble(reasons.UNSCHEDULABLE, "0/4 nodes: insufficient gpu", observed.now_s)
    pods = tuple(p if p.containers_ready else replace(p, trouble=no_node) for p in observed.pods)
    observed = replace(observed, pods=pods)
    assert not drained(plan(cluster, observed))
    later = replace(observed, now_s=observed.now_s + 31)
    assert drained(plan(cluster, later)) == ["prefill-p-1", "decode-d-1"]


def test_a_change_of_one_pool_leaves_the_other_alone():
    cluster, observed = rollout_of(prefill=3, decode=3)
    start = change(cluster, revision="old", pairing="old")
    only = of_pool(start, "prefill", revision="other")
    before = {p.uid for p in observed.pods if p.pool == "decode"}
    after = advance(only, observed, 30)
    assert {p.uid for p in after.pods if p.pool == "decode"} == before
    assert {p.revision for p in after.pods if p.pool == "prefill"} == {"other"}


def test_the_ratio_of_prefill_to_decode_holds_at_every_step_give_or_take_one():
    cluster, observed = rollout_of(prefill=4, decode=8, max_surge=0, max_unavailable=3, max_skew=1.0)
    cluster = replace(cluster, ratio=PoolRatio(min_prefill_per_decode="0.5", max_prefill_per_decode="0.5"))
    for prefill, decode in counts(cluster, observed):
        p, d = prefill["old"] + prefill["new"], decode["old"] + decode["new"]
        assert any(cluster.ratio.allows(*near) for near in ((p, d), (p + 1, d), (p, d + 1), (p - 1, d)))


def test_replicas_are_no_part_of_a_rollout():
    cluster, observed = rollout_of(prefill=2, decode=2)
    start = change(cluster, revision="old", pairing="old")
    more = of_pool(start, "prefill", replicas=5)
    made = plan(more, observed)
    assert created(made) == ["prefill-p-2", "prefill-p-3", "prefill-p-4"]
    assert not any(isinstance(action, DeletePod | SetGate) for action in made.actions)


def test_gates_that_others_closed_are_not_taken_for_victims():
    cluster, observed = rollout_of(prefill=2, decode=2)
    start = change(cluster, revision="old", pairing="old")
    first = observed.pods[0]
    gate = Gate(False, reasons.MARKED_BY_USER, observed.now_s)
    pods = (replace(first, gate=gate), *observed.pods[1:])
    made = plan(start, replace(observed, pods=pods))
    assert not any(isinstance(action, DeletePod | MarkDrain | CreatePod) for action in made.actions)
