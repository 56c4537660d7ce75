"""What a pool's status and conditions say, and what of it is read back."""

import re
from dataclasses import replace

import pytest

from mooncake_core.api.status import PoolStatus
from mooncake_operator.planning import reasons
from mooncake_operator.planning.observed import Condition, ObservedPod, PoolHistory, Trouble
from mooncake_operator.planning.plan import plan
from mooncake_operator.planning.preview import carry_out, rollout_of, settle, steps
from mooncake_operator.planning.reading import pool_history
from mooncake_operator.planning.refusals import refusal
from mooncake_operator.planning.statuses import pool_status, timestamp
from mooncake_operator.planning.verdicts import pool_verdicts


def verdicts(cluster, observed, pool="prefill", refusals=()):
    outcome = plan(cluster, observed).outcomes[pool]
    return {v.type: v for v in pool_verdicts(cluster, outcome, observed, refusals)}


def at_rest():
    cluster, observed = rollout_of(prefill=2, decode=2)
    pools = tuple(replace(p, revision="old", pairing="old") for p in cluster.pools)
    return replace(cluster, pools=pools), observed


def with_trouble(observed, pod, reason, message, **fields):
    trouble = Trouble(reason, message)
    pods = tuple(
        replace(p, trouble=trouble, containers_ready=False, **fields) if p.name == pod else p
        for p in observed.pods
    )
    return replace(observed, pods=pods)


def test_at_rest_all_is_well():
    found = verdicts(*at_rest())
    assert {name: v.holds for name, v in found.items()} == {
        "Available": True,
        "Progressing": False,
        "Degraded": False,
        "Scheduled": True,
        "FabricReady": True,
    }
    assert found["Progressing"].reason == reasons.COMPLETE


def named_budget(text):
    return int(re.search(r"set coordination.gpuBudget to (\d+) or more", text)[1])


def test_a_rollout_that_neither_the_budget_nor_the_floor_lets_go_on_names_the_numbers():
    cluster, observed = rollout_of(prefill=2, decode=3, max_surge=1, max_unavailable=0, gpus=8, gpu_budget=40)
    found = verdicts(cluster, observed)
    for verdict in (found["Progressing"], found["Available"]):
        assert (verdict.holds, verdict.reason) == (False, reasons.GPU_BUDGET)
        assert "an instance takes 8 GPUs, 40 of coordination.gpuBudget 40 are in use" in verdict.message
        assert "would have 1 routable instances, it needs 2" in verdict.message
    mended = replace(cluster, gpu_budget=named_budget(found["Progressing"].message))
    assert mended.gpu_budget == 48
    *_, last = steps(mended, observed)
    assert {name: counts["new"] for name, counts in last.counts.items()} == {"prefill": 2, "decode": 3}


def test_smaller_and_more_instances_that_the_old_ones_leave_no_room_for_are_a_standstill_too():
    cluster, observed = at_rest()
    smaller = tuple(
        replace(p, revision="new", replicas=3, gpus_per_pod=2, max_unavailable=1, max_surge=0)
        if p.name == "prefill"
        else p
        for p in cluster.pools
    )
    eight = tuple(replace(pod, gpus=8) if pod.pool == "prefill" else pod for pod in observed.pods)
    wanted = replace(cluster, pools=smaller, gpu_budget=18)
    found = verdicts(wanted, replace(observed, pods=eight))
    assert (found["Progressing"].holds, found["Progressing"].reason) == (False, reasons.GPU_BUDGET)
    assert "it needs 2" in found["Progressing"].message
    assert named_budget(found["Progressing"].message) == 20


def test_waiting_for_gpus_of_what_is_ending_is_no_standstill():
    cluster, observed = rollout_of(prefill=2, decode=2, max_unavailable=1, gpus=8, gpu_budget=32)
    while made := plan(cluster, observed):
        assert not any(outcome.stuck for outcome in made.outcomes.values())
        if not made.actions and not made.waits:
            break
        observed = settle(carry_out(cluster, observed, made))


def test_pools_without_pods_are_not_said_to_be_scheduled():
    cluster, observed = at_rest()
    found = verdicts(cluster, replace(observed, pods=()))
    assert (found["Scheduled"].holds, found["Scheduled"].reason) == (None, reasons.NO_PODS)


def test_over_rdma_the_fabric_is_unknown_without_a_node_agent_unless_no_node_has_the_resource():
    cluster, observed = at_rest()
    cluster = replace(cluster, protocol="RDMA")
    fabric = verdicts(cluster, observed)["FabricReady"]
    assert (fabric.holds, fabric.reason) == (None, reasons.FABRIC_UNREPORTED)
    message = "0/5 nodes are available: 5 Insufficient rdma/hca_shared_devices_a."
    observed = with_trouble(observed, "prefill-p-1", "Unschedulable", message, node="")
    fabric = verdicts(cluster, observed)["FabricReady"]
    assert (fabric.holds, fabric.reason) == (False, reasons.INSUFFICIENT_RDMA)


def test_old_instances_do_not_pass_for_new_ones():
    cluster, observed = rollout_of(prefill=2, decode=2)
    found = verdicts(cluster, observed)
    assert (found["Available"].holds, found["Available"].reason) == (False, reasons.ROLLING_OUT)
    assert "2 of 2 instances are routable, 0 of 2 with the newest revision" in found["Available"].message


def test_a_rollout_without_progress_is_stuck_after_its_deadline_and_says_why():
    cluster, observed = rollout_of(prefill=2, decode=2)
    observed = carry_out(cluster, observed, plan(cluster, observed))
    observed = with_trouble(observed, "prefill-p-2", "ImagePullBackOff", "container engine: not found: x:y")
    made = plan(cluster, observed)
    assert made.look_again_s is not None
    in_time = verdicts(cluster, replace(observed, now_s=observed.now_s + 1799))
    assert in_time["Progressing"].holds
    late = verdicts(cluster, replace(observed, now_s=observed.now_s + 1801))["Progressing"]
    assert (late.holds, late.reason) == (False, reasons.DEADLINE_EXCEEDED)
    assert "not found: x:y" in late.message


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (("False", reasons.COMPLETE, 0), reasons.SCALING),
        (("False", reasons.PAUSED, 0), reasons.SCALING),
        (("False", reasons.GPU_BUDGET, 0), reasons.SCALING),
        (("True", reasons.SCALING, 4000), reasons.SCALING),
        (("True", reasons.SCALING, 1000), reasons.DEADLINE_EXCEEDED),
        (("False", reasons.DEADLINE_EXCEEDED, 4000), reasons.DEADLINE_EXCEEDED),
    ],
)
def test_the_deadline_counts_from_when_a_pool_has_something_to_do(before, reason):
    """Not from its last rollout, which may be long ago when it is scaled or an instance crashes."""
    cluster, observed = at_rest()
    status, word, since_s = before
    history = PoolHistory(
        update_revision="old",
        update_started_s=observed.now_s,
        conditions={"Progressing": Condition(status, word, observed.now_s + since_s)},
    )
    larger = tuple(replace(p, replicas=3) for p in cluster.pools)
    observed = replace(observed, now_s=observed.now_s + 4001, histories={"prefill": history})
    found = verdicts(replace(cluster, pools=larger), observed)["Progressing"]
    assert found.reason == reason


def test_the_words_of_a_condition_do_not_change_with_time_alone():
    cluster, observed = rollout_of(prefill=2, decode=2)
    observed = carry_out(cluster, observed, plan(cluster, observed))
    late = replace(observed, now_s=observed.now_s + 4000)
    later = replace(late, now_s=late.now_s + 77)
    assert verdicts(cluster, late) == verdicts(cluster, later)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("0/5 nodes are available: 5 Insufficient nvidia.com/gpu.", reasons.INSUFFICIENT_GPU),
        ("0/5 nodes are available: 5 Insufficient amd.com/gpu.", reasons.INSUFFICIENT_GPU),
        ("0/5 nodes are available: 5 Insufficient rdma/hca_shared_devices_a.", reasons.INSUFFICIENT_RDMA),
        ("0/5 nodes are available: 5 Insufficient hugepages-2Mi.", reasons.INSUFFICIENT_HUGEPAGES),
        ('persistentvolumeclaim "models" not found', reasons.VOLUME_MISSING),
        ("0/5 nodes are available: 5 Insufficient memory.", reasons.INSUFFICIENT_MEMORY),
        ("0/5 nodes are available: 5 node(s) had untolerated taint {a: b}", reasons.UNTOLERATED_TAINT),
        (
            "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector.",
            reasons.NODE_UNMATCHED,
        ),
        (
            "0/5 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            reasons.VOLUME_UNBOUND,
        ),
        ("0/5 nodes are available: 5 node(s) had volume node affinity conflict.", reasons.VOLUME_UNBOUND),
        ("0/5 nodes are available: 5 node(s) are full of somebody's Pods", reasons.UNSCHEDULABLE),
    ],
)
def test_what_the_scheduler_lacks_becomes_a_reason(message, reason):
    cluster, observed = at_rest()
    observed = with_trouble(observed, "prefill-p-1", "Unschedulable", message, node="")
    found = verdicts(cluster, observed)
    assert (found["Scheduled"].holds, found["Scheduled"].reason) == (False, reason)
    assert message in found["Scheduled"].message
    assert "prefill-p-1" in found["Available"].message


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff", reasons.IMAGE_UNAVAILABLE),
        ("CreateContainerConfigError", reasons.CONFIG_MISSING),
        ("CrashLoopBackOff", reasons.CRASHING),
        ("FailedMount", reasons.CONFIG_MISSING),
        ("FailedCreatePodSandBox", reasons.SANDBOX_FAILED),
    ],
)
def test_what_the_kubelet_lacks_becomes_a_reason(waiting, reason):
    cluster, observed = at_rest()
    observed = with_trouble(observed, "prefill-p-1", waiting, 'container engine: secret "hf" not found')
    found = verdicts(cluster, observed)
    assert (found["Degraded"].holds, found["Degraded"].reason) == (True, reason)
    assert 'secret "hf" not found' in found["Available"].message


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, 'pods "x" is forbidden: exceeded quota: q, requested: pods=1', reasons.QUOTA_EXCEEDED),
        (403, 'pods "x" is forbidden: failed quota: q: must specify cpu for: engine', reasons.QUOTA_EXCEEDED),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', reasons.POD_SECURITY),
        (
            403,
            'pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
            reasons.LIMIT_RANGE,
        ),
        (
            403,
            'pods "x" is forbidden: error looking up service account a/b: serviceaccount "b" not found',
            reasons.REFERENCE_MISSING,
        ),
        (403, 'pods "x" is forbidden: no PriorityClass with name gold was found', reasons.REFERENCE_MISSING),
        (403, 'pods is forbidden: User "op" cannot create resource "pods"', reasons.FORBIDDEN),
        (403, 'admission webhook "w.example" denied the request: no', reasons.ADMISSION_REFUSED),
        (400, 'admission webhook "w.example" denied the request: no', reasons.ADMISSION_REFUSED),
        (403, 'pods "x" is forbidden: for reasons of its own', reasons.ADMISSION_REFUSED),
        (422, 'Pod "x" is invalid: spec.containers[0].image: Required value', reasons.INVALID_POD),
        (403, 'Pod "x" is invalid: spec.containers[0].image: Required value', reasons.INVALID_POD),
        (500, 'failed calling webhook "w.example": no endpoints', reasons.WEBHOOK_UNAVAILABLE),
        (500, "etcdserver: request timed out", reasons.CREATE_FAILED),
    ],
)
def test_why_the_api_server_takes_no_pod_becomes_a_reason(status, message, reason):
    found = refusal(status, message)
    assert found.reason == reason
    assert message in found.message
    cluster, observed = at_rest()
    assert verdicts(cluster, observed, refusals=[found])["Degraded"].reason == reason


@pytest.mark.parametrize("status", [403, 422])
def test_a_request_above_the_limit_that_a_limit_range_gives_is_told_with_where_to_write_both(status):
    message = 'Pod "q-scheduler-1" is invalid: "250m": must be less than or equal to cpu limit of 10m'
    found = refusal(status, message)
    assert found.reason == reasons.INVALID_POD
    assert "a default of the namespace's LimitRange: write request and limit" in found.message


def test_foreign_pods_are_named_and_left_alone():
    cluster, observed = at_rest()
    stranger = ObservedPod("mine", "x", "", "prefill", "mine")
    found = verdicts(cluster, replace(observed, pods=(*observed.pods, stranger)))
    assert (found["Degraded"].reason, "Pod mine" in found["Degraded"].message) == (reasons.FOREIGN_POD, True)


def test_status_is_what_the_api_allows_and_is_read_back_as_it_was():
    cluster, observed = rollout_of(prefill=2, decode=2)
    pods = tuple(
        replace(p, phase="Failed", containers_ready=False, ending=Trouble("Evicted", "disk"))
        if p.name == "prefill-p-0"
        else p
        for p in observed.pods
    )
    observed = replace(observed, pods=pods)
    outcome = plan(cluster, observed).outcomes["prefill"]
    status = pool_status(outcome, observed)
    assert PoolStatus.model_validate(status).replicas == 2
    history = pool_history(status)
    assert history.recreations == tuple(
        replace(record, at_s=float(int(record.at_s))) for record in outcome.recreations
    )
    assert history.update_revision == "new"
    assert history.current_revision == "old"
    assert history.update_started_s == float(int(observed.now_s))


def test_status_of_every_step_is_what_the_api_allows():
    cluster, observed = rollout_of(prefill=3, decode=2)
    for _ in steps(cluster, observed):
        made = plan(cluster, observed)
        for outcome in made.outcomes.values():
            PoolStatus.model_validate(pool_status(outcome, observed))
        observed = settle(carry_out(cluster, observed, made))
    assert pool_status(made.outcomes["prefill"], observed)["currentRevision"] == "new"


def test_times_are_written_as_kubernetes_writes_them():
    assert timestamp(0) == "1970-01-01T00:00:00Z"
