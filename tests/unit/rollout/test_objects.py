"""ControllerRevisions, the Pods made from them, budgets and policies; and how live Pods are read back."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.api import load_manifests
from mooncake_core.registry import InstanceState
from mooncake_operator.planning import ClusterNames, Credentials, Images, reasons, render
from mooncake_operator.planning.actions import CreatePod
from mooncake_operator.planning.manifests.disruption import pods_to_keep
from mooncake_operator.planning.manifests.plan import plan_of
from mooncake_operator.planning.manifests.revisions import (
    PLACEHOLDER,
    controller_revision,
    owner_reference,
    pod_of,
)
from mooncake_operator.planning.observed import Observed, ObservedPod, Trouble
from mooncake_operator.planning.plan import plan
from mooncake_operator.planning.reading import observed_pod, observed_revision, registrations
from mooncake_operator.planning.wishes import Identity, desired_cluster, present_instances

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
CLUSTER_OBJECT = {
    "apiVersion": "mooncake.io/v1alpha1",
    "kind": "MooncakeCluster",
    "metadata": {"name": "quickstart", "uid": "uid-of-cluster"},
}


@pytest.fixture(scope="module")
def cluster():
    (loaded,) = load_manifests(QUICKSTART)
    return loaded


@pytest.fixture(scope="module")
def rendering(cluster):
    return plan_of(
        cluster, ClusterNames(), [], images=Images(), credentials=Credentials(redis_password="abc")
    )


@pytest.fixture(scope="module")
def desired(rendering):
    names = [pool.name for pool in rendering.engine_pools] + [rendering.store.name]
    pools = {name: Identity(f"uid-{name}", has_finalizer=True) for name in names}
    return desired_cluster(rendering, Identity("uid-of-cluster"), pools)


def owner(pool):
    return {**CLUSTER_OBJECT, "metadata": {"name": pool.name, "uid": pool.uid}}


def made_pods(rendering, desired):
    """Pods as the operator would make them for an empty cluster."""
    for action in plan(desired, Observed(0.0, registry={})).actions:
        if isinstance(action, CreatePod):
            pool = desired.pool(action.pool)
            reference = owner_reference(owner(pool))
            yield pool, pod_of(controller_revision(rendering, pool, 1, reference), action, reference)


def test_every_pod_of_the_quickstart_is_planned_and_made_as_it_is_rendered(cluster, rendering, desired):
    made = {pod["metadata"]["name"]: pod for _, pod in made_pods(rendering, desired)}
    rendered = render(cluster, ClusterNames(), credentials=Credentials(redis_password="abc")).pods
    assert made.keys() == {pod["metadata"]["name"] for pod in rendered}
    for pod in rendered:
        own = made[pod["metadata"]["name"]]
        assert own["spec"]["containers"] == pod["spec"]["containers"]
        assert own["metadata"]["labels"].items() >= pod["metadata"]["labels"].items()
        assert PLACEHOLDER not in json.dumps(own)


def test_made_pods_are_read_back_as_what_was_planned(rendering, desired):
    for pool, pod in made_pods(rendering, desired):
        live = {**pod, "metadata": {**pod["metadata"], "uid": "u"}}
        read = observed_pod(live)
        assert (read.pool, read.owner_uid, read.revision) == (pool.name, pool.uid, pool.revision)
        assert (read.instance, read.pairing, read.rank) == (read.name, pool.pairing, 0)


def test_only_instances_that_schedulers_know_carry_the_gate(rendering, desired):
    for pool, pod in made_pods(rendering, desired):
        gates = pod["spec"].get("readinessGates", [])
        assert gates == ([{"conditionType": reasons.GATE}] if pool.gated else [])


def test_a_revision_is_read_back_and_its_name_is_a_label_value(rendering, desired):
    for pool in desired.pools:
        kept = controller_revision(rendering, pool, 7, owner_reference(owner(pool)))
        read = observed_revision(kept)
        assert (read.name, read.pool, read.number) == (pool.revision, pool.name, 7)
        assert (read.pairing, read.owner_uid) == (pool.pairing, pool.uid)
        assert all(len(value) <= 63 for value in kept["metadata"]["labels"].values())


def test_replicas_are_no_part_of_a_revision(cluster, rendering, desired):
    entries = [pool.model_copy(update={"replicas": 7}) for pool in cluster.spec.prefill_pools]
    spec = cluster.spec.model_copy(update={"prefill_pools": entries})
    more = cluster.model_copy(update={"spec": spec})
    scaled = plan_of(more, ClusterNames(), [], images=Images(), credentials=Credentials())
    pools = {p.name: Identity(p.uid) for p in desired.pools}
    again = desired_cluster(scaled, Identity("uid-of-cluster"), pools)
    name = "quickstart-prefill"
    assert again.pool(name).replicas == 7
    assert again.pool(name).revision == desired.pool(name).revision


def test_a_live_pods_state_is_read_from_its_conditions():
    stamp = "2026-11-29T10:00:00Z"
    pod = {
        "metadata": {"name": "p", "uid": "u", "deletionTimestamp": stamp},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "ContainersReady", "status": "True"},
                {
                    "type": reasons.GATE,
                    "status": "False",
                    "reason": "Draining",
                    "lastTransitionTime": stamp,
                },
            ],
            "containerStatuses": [
                {
                    "name": "engine",
                    "restartCount": 2,
                    "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                },
                {"name": "sidecar", "restartCount": 9},
            ],
        },
    }
    read = observed_pod(pod)
    assert read.containers_ready
    assert (read.gate.status, read.gate.reason) == (False, "Draining")
    assert read.deleted_s == read.gate.since_s > 1.7e9
    assert read.engine_restarts == 2
    assert (read.ending.reason, "137" in read.ending.message) == ("OOMKilled", True)


@pytest.mark.parametrize(
    ("container", "ended"),
    [
        ({"ready": False, "started": True, "state": {"running": {}}}, False),
        ({"ready": True, "state": {"running": {}}}, False),
        ({"ready": False, "started": False, "state": {"running": {}}}, True),
        ({"ready": False, "started": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}, True),
        ({"ready": False, "started": False, "state": {"terminated": {"exitCode": 1}}}, True),
    ],
)
def test_a_container_that_is_late_with_a_probe_has_not_ended(container, ended):
    well = {"name": "sidecar", "ready": True, "started": True, "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [well, {"name": "engine", **container}]}
    assert observed_pod({"metadata": {"name": "p"}, "status": status}).containers_ended is ended


def test_work_in_flight_is_all_that_the_scheduler_promised_to_an_instance():
    load = {"queued_s": 3.5, "queued": 1, "batch": 2, "arriving": 3, "kv_tokens": 999}
    views = [
        {"id": "a", "role": "prefill", "state": "draining", "load": load},
        {"id": "kv", "role": "store", "state": "ready"},
    ]
    found = registrations(views)
    assert found.keys() == {"a"}
    assert (found["a"].state, found["a"].in_flight) == (InstanceState.DRAINING, 6)


@pytest.mark.parametrize(
    ("sizes", "least", "pods"),
    [
        ([1, 1, 1, 1], 3, 3),
        ([1, 1, 1, 1], 2, 2),
        ([2, 2, 2, 2], 3, 7),
        ([2, 2, 2, 2], 2, 6),
        ([2, 2, 2, 2], 9, 8),
        ([1, 1], 0, 0),
        # In the middle of a rollout: one of the new size beside the old ones.
        ([2, 2, 2, 2, 4], 3, 10),
        ([4, 1, 1], 2, 5),
    ],
)
def test_so_many_pods_may_go_as_instances_may(sizes, least, pods):
    assert pods_to_keep(sizes, least) == pods


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), least=st.integers(0, 6), data=st.data())
def test_no_evictions_that_a_budget_allows_break_more_instances_than_may_be_missing(sizes, least, data):
    """As the API server counts: what is healthy beyond what must stay may go, one Pod after the other."""
    keep = pods_to_keep(sizes, least)
    starting = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    whole = {number for number, late in enumerate(starting) if not late}
    healthy = [number for number in whole for _ in range(sizes[number])]
    before = len(whole)
    while len(healthy) > keep:
        healthy.remove(evicted := data.draw(st.sampled_from(sorted(healthy))))
        whole.discard(evicted)
    assert len(whole) >= min(before, least)


def test_a_single_instance_has_no_budget_that_could_only_block_drains(cluster):
    world = render(cluster, ClusterNames(), credentials=Credentials(redis_password="abc"))
    names = {budget["metadata"]["name"] for budget in world.disruption_budgets}
    assert names == {"quickstart-prefill", "quickstart-decode", "quickstart-scheduler"}


def test_a_single_scheduler_has_no_budget_either(cluster):
    alone = cluster.spec.scheduler.model_copy(update={"replicas": 1})
    spec = cluster.spec.model_copy(update={"scheduler": alone})
    world = render(
        cluster.model_copy(update={"spec": spec}),
        ClusterNames(),
        credentials=Credentials(redis_password="abc"),
    )
    assert "quickstart-scheduler" not in {b["metadata"]["name"] for b in world.disruption_budgets}


def test_budgets_select_what_they_are_named_after(cluster):
    world = render(cluster, ClusterNames(), credentials=Credentials(redis_password="abc"))
    for budget in world.disruption_budgets:
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        pods = (*world.pods, *world.scheduler_pods)
        chosen = [p for p in pods if wanted <= p["metadata"]["labels"].items()]
        assert len(chosen) == 2
        assert budget["spec"]["minAvailable"] == 1
        named_after = {
            p["metadata"]["labels"].get("mooncake.io/pool", "quickstart-scheduler") for p in chosen
        }
        assert named_after == {budget["metadata"]["name"]}


def selects(selector, labels):
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", ()))


def allowed(policies, source, target, port):
    """Whether policies let a Pod of the same namespace in."""
    chosen = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], target)]
    assert chosen, "no policy chooses the Pod: it is open to all"
    for rule in (rule for spec in chosen for rule in spec["ingress"]):
        peers = rule.get("from")
        ports = rule.get("ports")
        if (peers is None or any(selects(p["podSelector"], source) for p in peers)) and (
            ports is None or port in [p["port"] for p in ports]
        ):
            return True
    return False


@pytest.mark.parametrize(
    ("source", "target", "port", "expected"),
    [
        ("anybody", "scheduler", "serving", True),
        ("anybody", "scheduler", "admin", False),
        ("operator", "scheduler", "admin", True),
        ("anybody", "prefill", "http", False),
        ("scheduler", "prefill", "http", True),
        ("decode", "prefill", "side-channel", True),
        ("prefill", "redis", "redis", True),
        ("anybody", "redis", "redis", False),
        ("store-node", "redis", "redis", False),
        ("decode", "store-master", "rpc", True),
        ("anybody", "store-node", "rpc", False),
    ],
)
def test_who_may_speak_to_whom(cluster, source, target, port, expected):
    world = render(cluster, ClusterNames(), credentials=Credentials(redis_password="abc"))

    def labels(role):
        if role == "operator":
            return {"app.kubernetes.io/name": "mooncake", "app.kubernetes.io/component": "operator"}
        return {"mooncake.io/cluster": "quickstart", "mooncake.io/role": role} if role != "anybody" else {}

    assert allowed(world.network_policies, labels(source), labels(target), port) is expected


def test_schedulers_without_redis_are_told_of_old_and_new_instances_alike(cluster):
    scheduler = cluster.spec.scheduler.model_copy(update={"redis": None, "replicas": 1})
    alone = cluster.model_copy(update={"spec": cluster.spec.model_copy(update={"scheduler": scheduler})})
    pool = "quickstart-prefill"
    pods = [
        ObservedPod(f"{pool}-p-4", "a", "o", pool, f"{pool}-p-4", revision="r2", pairing="g2"),
        ObservedPod(f"{pool}-p-1", "b", "o", pool, f"{pool}-p-1", revision="r1", pairing="g1"),
        ObservedPod("stranger", "c", "", pool, "stranger", revision="r1", pairing="g1"),
    ]
    world = render(alone, ClusterNames(), present=present_instances(pods))
    (text,) = [m["data"]["instances.json"] for m in world.config_maps if "instances.json" in m["data"]]
    told = {i["id"]: i.get("revision") for i in json.loads(text) if i["role"] == "prefill"}
    newest = told.pop(f"{pool}-p-0")
    assert newest not in ("g1", "g2"), "it is wanted and not there yet"
    assert told == {f"{pool}-p-1": "g1", f"{pool}-p-4": "g2"}


def engine_status(**fields):
    return {"phase": "Running", "containerStatuses": [{"name": "engine", "ready": False, **fields}]}


def read_status(status):
    return observed_pod({"metadata": {"name": "p", "uid": "u"}, "status": status})


ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "loading\nno such model: kimi\n\n"}}


@pytest.mark.parametrize(
    "state",
    [
        {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}},
        ENDED,
    ],
    ids=["running again", "waiting", "ended again"],
)
def test_a_container_that_keeps_ending_is_one_trouble_until_it_is_ready(state):
    pod = read_status(engine_status(state=state, lastState=ENDED, restartCount=3))
    assert pod.trouble == Trouble("CrashLoopBackOff", "container engine ended 3 times")
    assert pod.ending is not None
    assert pod.ending.message == "container engine exited with 1, no such model: kimi"


def test_a_container_that_failed_once_and_is_ready_again_is_in_no_trouble():
    status = engine_status(lastState=ENDED, restartCount=3)
    status["containerStatuses"][0]["ready"] = True
    assert read_status(status).trouble is None


def test_an_init_container_that_did_its_work_is_not_taken_for_the_one_that_failed():
    status = engine_status(state=ENDED)
    status["initContainerStatuses"] = [
        {"name": "prepare", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    ]
    ending = read_status(status).ending
    assert ending is not None
    assert ending.message.startswith("container engine exited with 1")


def test_an_image_that_cannot_be_pulled_reads_the_same_while_the_kubelet_waits_and_tries():
    said = 'rpc error: code = NotFound desc = failed to pull and unpack image "x:y": not found'
    tries = read_status(engine_status(state={"waiting": {"reason": "ErrImagePull", "message": said}}))
    waits = f'Back-off pulling image "x:y": ErrImagePull: {said}'
    waits = read_status(engine_status(state={"waiting": {"reason": "ImagePullBackOff", "message": waits}}))
    assert tries.trouble is not None
    assert waits.trouble is not None
    assert tries.trouble.message == waits.trouble.message
