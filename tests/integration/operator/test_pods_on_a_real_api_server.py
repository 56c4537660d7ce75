"""Pods of pools: a real API server, the whole reconciler, played kubelets and a played admin port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_operator.control.cluster import ClusterReconciler
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.schedulers import Schedulers
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import (
    BY_KIND,
    CLUSTER,
    DECODE_POOL,
    DEPLOYMENT,
    POD,
    PREFILL_POOL,
    Object,
)
from mooncake_operator.metrics import Metrics
from mooncake_operator.settings import Settings
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_nodes import PlayedNodes, PlayedScheduler

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
GATE = "mooncake.io/routable"


class World:
    """A cluster `q` in a namespace, and everything that acts on it."""

    def __init__(self, client: Client, namespace: str, scheduler: PlayedScheduler) -> None:
        self.client = client
        self.namespace = namespace
        self.scheduler = scheduler
        self.nodes = PlayedNodes(client, namespace, scheduler)
        self.writes: list[tuple[str, str]] = []
        self.forgetful = False
        """Whether the operator is a new one for each pass, as if it had been killed after the last."""
        client._observer = self._seen
        self._recording = False
        self.restart()

    def restart(self) -> None:
        schedulers = Schedulers(port=self.scheduler.port)
        self.reconciler = ClusterReconciler(self.client, Settings(), Metrics(), schedulers=schedulers)

    def _seen(self, verb: str, plural: str, status: int, seconds: float) -> None:
        if self._recording and verb not in ("get", "list"):
            self.writes.append((verb, plural))

    async def apply(self, change: Callable[[Any], None] = lambda spec: None) -> Object:
        manifest = yaml.safe_load(QUICKSTART.read_text())
        manifest["metadata"] = {"name": "q", "namespace": self.namespace}
        manifest["spec"]["decodePools"][0]["drain"] = {"timeoutSeconds": 30}
        change(manifest["spec"])
        return await self.client.apply(manifest, manager="kubectl", force=True)

    async def step(self) -> Result:
        """Nodes do something, then one pass."""
        await self.nodes.play()
        return await self.reconcile()

    async def reconcile(self) -> Result:
        if self.forgetful:
            self.restart()
        self.writes.clear()
        self._recording = True
        try:
            return await self.reconciler.reconcile(Key(self.namespace, "q"))
        finally:
            self._recording = False

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str, steps: int = 60) -> None:
        for _ in range(steps):
            if await holds():
                return
            await self.step()
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within {steps} passes: {what}; {await self.condition('Ready')}")

    async def get(self, kind: str, name: str) -> Object | None:
        try:
            return await self.client.get(BY_KIND[kind], self.namespace, name)
        except NotFoundError:
            return None

    async def condition(self, type_: str, kind: str = "MooncakeCluster", name: str = "q") -> Object:
        live = await self.get(kind, name)
        assert live is not None
        found: Object = next((c for c in live["status"]["conditions"] if c["type"] == type_), {})
        return found

    async def is_ready(self) -> bool:
        return (await self.condition("Ready")).get("status") == "True"

    async def bring_up(self, change: Callable[[Any], None] = lambda spec: None) -> None:
        await self.apply(change)
        await self.nodes.add_scheduler("q")
        await self.reconcile()
        deployment = await self.get("Deployment", "q-scheduler")
        assert deployment is not None
        counts = {"replicas": 2, "readyReplicas": 2, "availableReplicas": 2, "updatedReplicas": 2}
        status = {"observedGeneration": deployment["metadata"]["generation"], **counts}
        await self.client.patch(
            DEPLOYMENT,
            self.namespace,
            "q-scheduler",
            {"status": status},
            how="merge",
            manager="test",
            subresource="status",
        )
        await self.until(self.is_ready, "the cluster is Ready")

    async def pods(self, role: str) -> list[str]:
        return sorted(await self.nodes.pods(role))

    async def gate(self, pod: str) -> Object:
        live = await self.get("Pod", pod)
        assert live is not None
        found: Object = next((c for c in live["status"].get("conditions", ()) if c["type"] == GATE), {})
        return found

    async def scale(self, number: int) -> None:
        body = {"spec": {"replicas": number}}
        await self.client.patch(
            DECODE_POOL, self.namespace, "q-decode", body, how="merge", manager="kubectl", subresource="scale"
        )


@pytest.fixture
async def world(client: Client, namespace: str) -> AsyncIterator[World]:
    async with PlayedScheduler().serve() as scheduler:
        yield World(client, namespace, scheduler)


async def test_a_cluster_becomes_ready_tells_of_itself_and_is_then_left_alone(world: World) -> None:
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


async def test_scaling_down_drains_the_least_busy_and_deletes_it_once_it_is_empty(world: World) -> None:
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
    world: World, forgetful: bool
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


async def test_the_gate_latches_while_schedulers_or_their_registry_are_away(world: World) -> None:
    await world.bring_up()
    world.scheduler.instances.clear()
    for fault in ("away", "degraded"):
        setattr(world.scheduler, fault, True)
        await world.reconcile()
        assert (await world.gate("q-decode-d-0"))["status"] == "True"
        assert world.writes == []
        setattr(world.scheduler, fault, False)


async def test_an_instance_that_a_user_drains_is_no_longer_routable_and_comes_back(world: World) -> None:
    await world.bring_up()
    world.scheduler.instances["q-decode-d-1"]["state"] = "draining"
    await world.step()
    assert (await world.gate("q-decode-d-1"))["status"] == "False"
    world.scheduler.instances["q-decode-d-1"]["state"] = "ready"
    await world.until(world.is_ready, "it is used again")
    assert await world.pods("decode") == ["q-decode-d-0", "q-decode-d-1"]


async def test_a_pod_that_failed_is_recorded_first_and_then_made_again(world: World) -> None:
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


async def test_a_redis_that_failed_is_made_again_too(world: World) -> None:
    await world.bring_up()
    (name,) = await world.pods("redis")
    old = await world.get("Pod", name)
    assert old is not None
    await world.nodes.set_status(name, {"phase": "Failed", "reason": "Evicted", "message": "node shut down"})

    async def is_new() -> bool:
        pod = await world.get("Pod", name)
        return pod is not None and pod["metadata"]["uid"] != old["metadata"]["uid"] and await world.is_ready()

    await world.until(is_new, "there is another Redis")


async def test_a_foreign_pod_of_a_wanted_name_is_neither_adopted_nor_killed(world: World) -> None:
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
    world: World, api_server: ApiServer
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
    async with asyncio.timeout(20):
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


async def test_a_pod_security_level_that_forbids_pods_is_named(world: World, api_server: ApiServer) -> None:
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    api_server.request(
        "PATCH", f"/api/v1/namespaces/{world.namespace}", labels, "application/merge-patch+json"
    )

    def privileged(spec: Any) -> None:
        container = {"name": "engine", "securityContext": {"privileged": True}}
        spec["prefillPools"][0]["podTemplate"] = {"spec": {"containers": [container]}}

    await world.apply(privileged)
    await world.reconcile()
    await world.reconcile()
    degraded = await world.condition("Degraded", "MooncakePrefillPool", "q-prefill")
    assert degraded["reason"] == "PodSecurityForbidden"


async def test_deleting_a_cluster_under_load_empties_its_instances_first_and_leaves_nothing(
    world: World,
) -> None:
    await world.bring_up()
    pool = await world.get("MooncakeDecodePool", "q-decode")
    assert pool is not None
    assert pool["metadata"]["finalizers"] == ["mooncake.io/drain"]
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    await world.client.delete(CLUSTER, world.namespace, "q", uid=cluster["metadata"]["uid"])
    async with asyncio.timeout(40):
        while await world.get("MooncakeDecodePool", "q-decode") or await world.get("Pod", "q-decode-d-0"):
            await world.step()
            await asyncio.sleep(0.1)
    assert await world.get("MooncakePrefillPool", "q-prefill") is None


async def test_a_node_that_is_dead_does_not_hold_a_deleted_pool_for_ever(world: World) -> None:
    await world.bring_up()
    world.nodes.stuck = {"q-prefill-p-0"}
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    later = 0.0
    schedulers = Schedulers(port=world.scheduler.port)
    world.reconciler = ClusterReconciler(
        world.client, Settings(), Metrics(), schedulers=schedulers, clock=lambda: time.time() + later
    )
    uid = pool["metadata"]["uid"]
    await world.client.delete(PREFILL_POOL, world.namespace, "q-prefill", uid=uid)
    for _ in range(6):
        await world.step()
    live = await world.get("MooncakePrefillPool", "q-prefill")
    assert live is not None
    assert live["metadata"]["uid"] == uid
    later = 3600.0

    async def is_another() -> bool:
        found = await world.get("MooncakePrefillPool", "q-prefill")
        return found is not None and found["metadata"]["uid"] != uid

    await world.until(is_another, "the pool is let go, and made anew since the cluster still wants it")
    world.nodes.stuck = set()
    await world.nodes.play()


async def test_engine_pods_are_never_written_again_but_for_their_gate(world: World) -> None:
    await world.bring_up()
    pod = await world.client.get(POD, world.namespace, "q-prefill-p-0")
    ours = [
        (entry["operation"], entry.get("subresource"))
        for entry in pod["metadata"]["managedFields"]
        if entry["manager"] == "mooncake-operator"
    ]
    assert sorted(ours, key=str) == [("Update", "status"), ("Update", None)]
