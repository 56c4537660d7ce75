"""Pods of pools: a real API server, the whole reconciler, played kubelets and a played admin port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from mooncake_operator.kube.resources import CLUSTER, POD, PREFILL_POOL, Object
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_world import GATE, PlayedWorld


async def test_a_cluster_becomes_ready_tells_of_itself_and_is_then_left_alone(world: PlayedWorld) -> None:
    await world.bring_up()
    assert await world.pods("prefill") == ["q-prefill-p-0", "q-prefill-p-1"]
    assert await world.pods("decode") == ["q-decode-d-0", "q-decode-d-1"]
    assert len(await world.pods("redis")) == 1
    assert (await world.gate("q-decode-d-0"))["status"] == "True"
    status = (await world.client.get(CLUSTER, world.namespace, "q"))["status"]
    assert (status["prefill"], status["decode"], status["kv"]) == ("2/2", "2/2", "1/1")
    pool = (await world.client.get(PREFILL_POOL, world.namespace, "q-prefill"))["status"]
    assert (pool["replicas"], pool["routableReplicas"], pool["updatedReplicas"]) == (2, 2, 2)
    token = {header for header in world.scheduler.tokens if header}
    assert len(token) == 1, "the schedulers are asked with the token of the cluster's Secret"
    for _ in range(3):
        result = await world.step()
        assert world.writes == []
        assert result.requeue_after_s == 30, "deregistrations are noticed without any event"


async def test_scaling_down_drains_the_least_busy_and_deletes_it_once_it_is_empty(world: PlayedWorld) -> None:
    await world.bring_up()
    world.scheduler.instances["q-decode-d-0"]["in_flight"] = 2
    world.scheduler.instances["q-decode-d-1"]["in_flight"] = 7
    await world.scale(1)
    for _ in range(4):
        await world.step()
    assert await world.pods("decode") == ["q-decode-d-0", "q-decode-d-1"]
    assert (await world.gate("q-decode-d-0"))["reason"] == "Draining"
    assert world.scheduler.calls == ["draining q-decode-d-0"]
    result = await world.step()
    assert result.requeue_after_s == 1, "work in flight is watched closely"
    world.scheduler.instances["q-decode-d-0"]["in_flight"] = 0
    await world.until(lambda: _is(world.pods("decode"), ["q-decode-d-1"]), "the empty one is gone")


async def _is(found: Awaitable[Any], wanted: Any) -> bool:
    return bool(await found == wanted)


def new_image(spec: Any) -> None:
    spec["engine"]["simulated"]["timeScale"] = 20


@pytest.mark.parametrize("forgetful", [False, True], ids=["one operator", "killed after each pass"])
async def test_a_rollout_ends_with_all_new_and_never_with_a_role_without_an_instance(
    world: PlayedWorld, forgetful: bool
) -> None:
    world.forgetful = forgetful
    await world.bring_up()
    before = {pod["metadata"]["uid"] for pod in (await world.nodes.pods("prefill")).values()}
    await world.apply(new_image)
    least = 9

    async def is_over() -> bool:
        nonlocal least
        pods = {**await world.nodes.pods("prefill"), **await world.nodes.pods("decode")}
        for role in ("prefill", "decode"):
            gates = [
                any(c["type"] == GATE and c["status"] == "True" for c in pod["status"].get("conditions", ()))
                for pod in pods.values()
                if pod["metadata"]["labels"]["mooncake.io/role"] == role
            ]
            least = min(least, sum(gates))
        revisions = {
            pod["metadata"]["labels"]["mooncake.io/pairing"]
            for pod in pods.values()
            if "mooncake.io/pairing" in pod["metadata"]["labels"]
        }
        done = not before & {pod["metadata"]["uid"] for pod in pods.values()}
        return done and len(revisions) == 1 and await world.is_ready()

    await world.reconcile()
    await world.until(is_over, "all instances are new", steps=120)
    assert least >= 1
    assert len(await world.pods("prefill")) == len(await world.pods("decode")) == 2


async def test_the_gate_latches_while_schedulers_or_their_registry_are_away(world: PlayedWorld) -> None:
    await world.bring_up()
    world.scheduler.instances.clear()
    for fault in ("away", "degraded"):
        setattr(world.scheduler, fault, True)
        await world.reconcile()
        assert (await world.gate("q-decode-d-0"))["status"] == "True"
        assert world.writes == []
        setattr(world.scheduler, fault, False)


async def test_an_instance_that_a_user_drains_is_no_longer_routable_and_comes_back(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    world.scheduler.instances["q-decode-d-1"]["state"] = "draining"
    await world.step()
    assert (await world.gate("q-decode-d-1"))["status"] == "False"
    world.scheduler.instances["q-decode-d-1"]["state"] = "ready"
    await world.until(world.is_ready, "it is used again")
    assert await world.pods("decode") == ["q-decode-d-0", "q-decode-d-1"]


async def test_a_pod_that_failed_is_recorded_first_and_then_made_again(world: PlayedWorld) -> None:
    await world.bring_up()
    old = await world.get("Pod", "q-prefill-p-0")
    assert old is not None
    await world.nodes.set_status(
        "q-prefill-p-0", {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}
    )

    async def is_new() -> bool:
        pod = await world.get("Pod", "q-prefill-p-0")
        return pod is not None and pod["metadata"]["uid"] != old["metadata"]["uid"] and await world.is_ready()

    await world.until(is_new, "the Pod is another and the cluster Ready")
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    (failure,) = pool["status"]["lastFailures"]
    assert failure["instance"] == "q-prefill-p-0"
    assert "low on memory" in failure["message"]


async def test_a_redis_that_failed_is_made_again_too(world: PlayedWorld) -> None:
    await world.bring_up()
    (name,) = await world.pods("redis")
    old = await world.get("Pod", name)
    assert old is not None
    await world.nodes.set_status(name, {"phase": "Failed", "reason": "Evicted", "message": "node shut down"})

    async def is_new() -> bool:
        pod = await world.get("Pod", name)
        return pod is not None and pod["metadata"]["uid"] != old["metadata"]["uid"] and await world.is_ready()

    await world.until(is_new, "there is another Redis")


async def test_schedulers_and_redis_go_where_their_templates_say_and_engines_stay(world: PlayedWorld) -> None:
    await world.bring_up()
    engines = {**await world.uids("prefill"), **await world.uids("decode"), **await world.uids("store-node")}
    (old,) = (await world.uids("redis")).values()

    def template(name: str) -> dict[str, Any]:
        own = {"name": name, "resources": {"limits": {"cpu": 1, "memory": "0.5Gi"}}}
        return {
            "metadata": {"labels": {"team": "llm"}},
            "spec": {
                "nodeSelector": {"pool": "cpu"},
                "tolerations": [{"key": "cpu", "operator": "Exists"}],
                "imagePullSecrets": [{"name": "registry"}],
                "containers": [own, {"name": "logs", "image": "fluent-bit"}],
            },
        }

    def place(spec: Any) -> None:
        spec["scheduler"]["podTemplate"] = template("scheduler")
        spec["scheduler"]["redis"] = {"managed": {"podTemplate": template("redis")}}

    await world.apply(place)

    async def is_new() -> bool:
        return old not in (await world.uids("redis")).values() and await world.is_ready()

    await world.until(is_new, "there is another Redis")
    deployment, redis = await world.get("Deployment", "q-scheduler"), await world.get("Pod", "q-redis-0")
    assert deployment is not None
    assert redis is not None
    for made, main in ((deployment["spec"]["template"], "scheduler"), (redis, "redis")):
        assert made["metadata"]["labels"]["team"] == "llm"
        assert made["spec"]["nodeSelector"] == {"pool": "cpu"}
        assert made["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert {"key": "cpu", "operator": "Exists"} in made["spec"]["tolerations"]
        first, logs = made["spec"]["containers"]
        assert (first["name"], logs["name"]) == (main, "logs")
        assert first["resources"]["limits"] == {"cpu": "1", "memory": "512Mi"}
        assert first["resources"].get("requests", {}).keys() <= {"cpu", "memory"}
    for _ in range(3):
        await world.step()
    assert world.writes == []
    await world.apply()

    async def is_without() -> bool:
        deployment, redis = await world.get("Deployment", "q-scheduler"), await world.get("Pod", "q-redis-0")
        specs = [made["spec"] for made in (deployment and deployment["spec"]["template"], redis) if made]
        return len(specs) == 2 and not any("nodeSelector" in spec for spec in specs)

    await world.until(is_without, "templates that are taken away are gone from Pods")
    await world.until(world.is_ready, "the cluster is Ready again")
    assert {
        **await world.uids("prefill"),
        **await world.uids("decode"),
        **await world.uids("store-node"),
    } == engines


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"nodeSelectr": {"pool": "cpu"}}, ".spec.template.spec.nodeSelectr: field not declared in schema"),
        (
            {"containers": [{"name": "scheduler", "resources": {"limits": {"cpu": "lots"}}}]},
            "quantities must",
        ),
        (
            {
                "containers": [
                    {"name": "scheduler", "resources": {"limits": {"cpu": 1}, "requests": {"cpu": 2}}}
                ]
            },
            "must be less than or equal to cpu limit of 1",
        ),
    ],
)
async def test_a_schedulers_template_that_is_refused_is_named_and_holds_up_nothing_else(
    world: PlayedWorld, spec: dict[str, Any], expected: str
) -> None:
    await world.bring_up()
    before = await world.get("Deployment", "q-scheduler")

    def place(spec_of_cluster: Any) -> None:
        spec_of_cluster["scheduler"]["podTemplate"] = {"spec": spec}
        spec_of_cluster["decodePools"][0]["replicas"] = 3

    await world.apply(place)

    async def is_scaled() -> bool:
        return len(await world.routable("decode")) == 3

    await world.until(is_scaled, "pools are scaled beside it")
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidObject")
    assert "Deployment q-scheduler: the API server refuses it" in ready["message"]
    assert expected in ready["message"]
    assert ready["message"].endswith("; change spec.scheduler.podTemplate")
    after = await world.get("Deployment", "q-scheduler")
    assert before is not None
    assert after is not None
    assert after["spec"] == before["spec"]
    await world.apply()
    await world.until(world.is_ready, "the mistake is taken back")


async def test_a_new_cluster_whose_redis_is_refused_says_that_and_not_that_schedulers_wait(
    world: PlayedWorld,
) -> None:
    def place(spec: Any) -> None:
        template = {"spec": {"priorityClassName": f"gold-{world.namespace}"}}
        spec["scheduler"]["redis"] = {"managed": {"podTemplate": template}}

    await world.apply(place)

    async def is_told() -> bool:
        ready = await world.condition("Ready")
        return ready.get("reason") == "ReferenceMissing" and "pool q-redis: " in ready["message"]

    await world.until(is_told, "the refusal of Redis is told", 10)
    await world.apply()

    async def waits() -> bool:
        return (await world.condition("Ready"))["reason"] == "SchedulerUnavailable"

    await world.until(waits, "nothing but time is wanting", 10)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"priorityClassName": "nobodys"}, "ReferenceMissing"),
        ({"tolerations": [{"operator": "Exist"}]}, "InvalidPod"),
        ({"nodeSelector": ["cpu"]}, "InvalidPod"),
    ],
)
async def test_a_redis_that_runs_stays_while_its_new_template_is_refused(
    world: PlayedWorld, spec: dict[str, Any], reason: str
) -> None:
    await world.bring_up()
    old = await world.uids("redis")

    def place(spec_of_cluster: Any) -> None:
        spec_of_cluster["scheduler"]["redis"] = {"managed": {"podTemplate": {"spec": spec}}}

    await world.apply(place)

    async def is_told() -> bool:
        return (await world.condition("Ready"))["reason"] == reason

    await world.until(is_told, "the refusal of Redis is told", 10)
    assert (await world.condition("Ready"))["message"].startswith("pool q-redis: 1 of 1 instances are")
    await world.step()
    assert await world.uids("redis") == old
    await world.apply()
    await world.until(world.is_ready, "the mistake is taken back")


async def test_a_full_quota_is_no_reason_to_keep_an_old_redis(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    await world.bring_up()
    (old,) = (await world.uids("redis")).values()
    quota: Object = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    api_server.request("POST", path, quota)
    full = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    api_server.request("PATCH", f"{path}/full/status", full, "application/merge-patch+json")

    def place(spec: Any) -> None:
        template = {"metadata": {"labels": {"team": "llm"}}}
        spec["scheduler"]["redis"] = {"managed": {"podTemplate": template}}

    await world.apply(place)

    async def is_gone() -> bool:
        return old not in (await world.uids("redis")).values()

    await world.until(is_gone, "the old one makes room", 10)


async def test_a_foreign_pod_of_a_wanted_name_is_neither_adopted_nor_killed(world: PlayedWorld) -> None:
    labels = {"mooncake.io/cluster": "q", "mooncake.io/pool": "q-prefill", "mooncake.io/role": "prefill"}
    foreign: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "q-prefill-p-0", "namespace": world.namespace, "labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "mine"}]},
    }
    made = await world.client.create(foreign, manager="test")
    await world.bring_up()
    live = await world.get("Pod", "q-prefill-p-0")
    assert live is not None
    assert live["metadata"]["uid"] == made["metadata"]["uid"]
    assert "ownerReferences" not in live["metadata"]
    assert set(await world.pods("prefill")) == {"q-prefill-p-0", "q-prefill-p-1", "q-prefill-p-2"}
    degraded = await world.condition("Degraded", "MooncakePrefillPool", "q-prefill")
    assert degraded["reason"] == "ForeignPod"


async def test_a_quota_that_forbids_pods_is_told_once_and_not_tried_hotly(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    hard = {"pods": "0"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight"},
        "spec": {"hard": hard},
    }
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    api_server.request("POST", path, quota)
    counted = {"status": {"hard": hard, "used": hard}}
    api_server.request("PATCH", f"{path}/tight/status", counted, "application/merge-patch+json")
    await world.apply()
    async with asyncio.timeout(180):
        while True:
            await world.reconcile()
            degraded = await world.condition("Degraded", "MooncakePrefillPool", "q-prefill")
            if degraded["reason"] == "QuotaExceeded":
                break
            await asyncio.sleep(0.5)
    assert "raise the namespace's ResourceQuota" in degraded["message"]
    result = await world.reconcile()
    assert result.requeue_after_s is not None
    assert result.requeue_after_s >= 5
    assert ("patch", "mooncakeprefillpools") not in world.writes
    tried = [write for write in world.writes if write == ("post", "pods")]
    assert len(tried) <= 5, "one Pod of each pool is tried, not all"


async def test_a_pod_security_level_that_forbids_pods_is_named(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    api_server.request(
        "PATCH", f"/api/v1/namespaces/{world.namespace}", labels, "application/merge-patch+json"
    )

    def privileged(spec: Any) -> None:
        container = {
            "name": "engine",
            "securityContext": {"privileged": True, "allowPrivilegeEscalation": True},
        }
        spec["prefillPools"][0]["podTemplate"] = {"spec": {"containers": [container]}}

    await world.apply(privileged)
    await world.reconcile()
    await world.reconcile()
    degraded = await world.condition("Degraded", "MooncakePrefillPool", "q-prefill")
    assert degraded["reason"] == "PodSecurityForbidden"


async def test_deleting_a_cluster_under_load_empties_its_instances_first_and_leaves_nothing(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    pool = await world.get("MooncakeDecodePool", "q-decode")
    assert pool is not None
    assert pool["metadata"]["finalizers"] == ["mooncake.io/drain"]
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    await world.client.delete(CLUSTER, world.namespace, "q", uid=cluster["metadata"]["uid"])

    async def left() -> list[str]:
        kinds = {"MooncakeDecodePool": "q-decode", "MooncakePrefillPool": "q-prefill", "Pod": "q-decode-d-0"}
        return [name for kind, name in kinds.items() if await world.get(kind, name)]

    async with asyncio.timeout(180):
        while await left():
            await world.step()
            await asyncio.sleep(0.1)


async def test_a_node_that_is_dead_does_not_hold_a_deleted_pool_for_ever(world: PlayedWorld) -> None:
    await world.bring_up()
    world.nodes.stuck = {"q-prefill-p-0"}
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    uid = pool["metadata"]["uid"]
    await world.client.delete(PREFILL_POOL, world.namespace, "q-prefill", uid=uid)
    for _ in range(6):
        await world.step()
    live = await world.get("MooncakePrefillPool", "q-prefill")
    assert live is not None
    assert live["metadata"]["uid"] == uid
    world.passed_s = 3600.0

    async def is_another() -> bool:
        found = await world.get("MooncakePrefillPool", "q-prefill")
        return found is not None and found["metadata"]["uid"] != uid

    await world.until(is_another, "the pool is let go, and made anew since the cluster still wants it")
    world.nodes.stuck = set()
    await world.nodes.play()


async def test_engine_pods_are_never_written_again_but_for_their_gate(world: PlayedWorld) -> None:
    await world.bring_up()
    pod = await world.client.get(POD, world.namespace, "q-prefill-p-0")
    ours = [
        (entry["operation"], entry.get("subresource"))
        for entry in pod["metadata"]["managedFields"]
        if entry["manager"] == "mooncake-operator"
    ]
    assert sorted(ours, key=str) == [("Update", "status"), ("Update", None)]
