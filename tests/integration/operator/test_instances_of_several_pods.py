"""Leader and workers on a real API server: made, failed, replaced, scaled and evicted as one instance."""

from __future__ import annotations

import asyncio
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_operator.kube.resources import Object, is_terminating, uid_of
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_world import PlayedWorld

LEADERS = ["q-prefill-p-0", "q-prefill-p-1"]
ALL = ["q-prefill-p-0", "q-prefill-p-0-w1", "q-prefill-p-1", "q-prefill-p-1-w1"]


def of_two_pods(spec: Any) -> None:
    spec["prefillPools"][0] |= {
        "instance": {"size": 2, "parallelism": {"tensor": 8, "pipeline": 2}},
        "resources": {"gpu": {"count": 8}, "sharedMemory": "1Gi"},
        "drain": {"timeoutSeconds": 30},
    }


def of_one_pod(spec: Any) -> None:
    of_two_pods(spec)
    spec["prefillPools"][0] |= {"instance": {"size": 1, "parallelism": {"tensor": 8}}}


async def prefill(world: PlayedWorld) -> dict[str, Object]:
    return await world.nodes.pods("prefill")


async def is_whole(world: PlayedWorld) -> bool:
    """Whether every leader has a worker that was started with it, and nobody else is there."""
    pods = await prefill(world)
    pairs = all(
        pods[name.removesuffix("-w1")]["metadata"]["uid"] == _leader_uid(pod)
        for name, pod in pods.items()
        if name.endswith("-w1") and name.removesuffix("-w1") in pods
    )
    return sorted(pods) == ALL and pairs and await world.is_ready()


def _leader_uid(pod: Object) -> str:
    return str(pod["metadata"]["annotations"].get("mooncake.io/leader-uid", ""))


async def test_workers_follow_their_leaders_and_instances_are_what_is_counted(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    await world.bring_up(of_two_pods)
    pods = await prefill(world)
    assert sorted(pods) == ALL
    assert await is_whole(world)
    for name, pod in pods.items():
        leads = name in LEADERS
        assert bool(pod["spec"].get("readinessGates")) is leads
        assert pod["spec"]["hostname"] == name
        assert [c["name"] for c in pod["spec"]["containers"]] == ["engine"] + ["sidecar"] * leads
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    status = pool["status"]
    assert (status["replicas"], status["readyReplicas"], status["routableReplicas"]) == (2, 2, 2)
    path = f"/apis/mooncake.io/v1alpha1/namespaces/{world.namespace}/mooncakeprefillpools/q-prefill/scale"
    selector = api_server.request("GET", path)["status"]["selector"]
    selected = api_server.request(
        "GET", f"/api/v1/namespaces/{world.namespace}/pods?labelSelector={selector.replace('=', '%3D')}"
    )
    assert sorted(pod["metadata"]["name"] for pod in selected["items"]) == LEADERS
    await world.step()
    assert world.writes == []


@pytest.mark.parametrize("forgetful", [False, True], ids=["one operator", "killed after each pass"])
@pytest.mark.parametrize("failed", ["q-prefill-p-1", "q-prefill-p-1-w1"])
async def test_a_pod_that_failed_takes_its_whole_instance_and_no_other(
    world: PlayedWorld, failed: str, forgetful: bool
) -> None:
    world.forgetful = forgetful
    await world.bring_up(of_two_pods)
    before = await world.uids("prefill")
    status = {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}
    await world.nodes.set_status(failed, status)

    async def is_new() -> bool:
        now = await world.uids("prefill")
        return await is_whole(world) and not {before[n] for n in ALL[2:]} & {*now.values()}

    await world.until(is_new, "both Pods are others")
    now = await world.uids("prefill")
    assert [now[name] for name in ALL[:2]] == [before[name] for name in ALL[:2]]
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    (failure,) = pool["status"]["lastFailures"]
    assert failure["instance"] == "q-prefill-p-1"
    assert failure["message"].startswith(f"Pod {failed} ")


async def test_a_workers_engine_that_restarts_takes_its_whole_instance(world: PlayedWorld) -> None:
    await world.bring_up(of_two_pods)
    before = await world.uids("prefill")
    container = {
        "name": "engine",
        "restartCount": 1,
        "ready": True,
        "image": "i",
        "imageID": "i",
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }
    await world.nodes.set_status("q-prefill-p-0-w1", {"containerStatuses": [container]})

    async def is_new() -> bool:
        now = await world.uids("prefill")
        return await is_whole(world) and not {before[n] for n in ALL[:2]} & {*now.values()}

    await world.until(is_new, "both Pods are others")
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    assert "OOMKilled" in pool["status"]["lastFailures"][0]["message"]


@pytest.mark.parametrize("forgetful", [False, True], ids=["one operator", "killed after each pass"])
async def test_a_rollout_to_another_size_replaces_whole_instances_and_breaks_no_old_one(
    world: PlayedWorld, forgetful: bool
) -> None:
    world.forgetful = forgetful
    await world.bring_up(of_two_pods)
    before = await world.uids("prefill")
    fewest = 9

    async def is_over() -> bool:
        nonlocal fewest
        pods = await prefill(world)
        fewest = min(fewest, len(await world.routable("prefill")))
        for name, pod in pods.items():
            leader = pods.get(name.removesuffix("-w1"))
            if name.endswith("-w1") and leader is not None and not is_terminating(leader):
                assert _leader_uid(pod) == uid_of(leader)
                assert pod["metadata"]["annotations"]["mooncake.io/instance-size"] == "2"
        return not {*before.values()} & {*(await world.uids("prefill")).values()} and await world.is_ready()

    await world.apply(of_one_pod)
    await world.reconcile()
    await world.until(is_over, "all instances are of one Pod", steps=120)
    assert fewest >= 1
    pods = await prefill(world)
    assert len(pods) == 2
    assert not [name for name in pods if name.endswith("-w1")]
    pool = await world.get("MooncakePrefillPool", "q-prefill")
    assert pool is not None
    assert pool["status"].get("lastFailures", []) == []


async def test_scaling_down_empties_an_instance_and_then_takes_all_of_its_pods(world: PlayedWorld) -> None:
    await world.bring_up(of_two_pods)
    world.scheduler.instances["q-prefill-p-0"]["in_flight"] = 1
    world.scheduler.instances["q-prefill-p-1"]["in_flight"] = 5

    def fewer(spec: Any) -> None:
        of_two_pods(spec)
        spec["prefillPools"][0]["replicas"] = 1

    await world.apply(fewer)
    for _ in range(4):
        await world.step()
    assert await world.pods("prefill") == ALL
    assert (await world.gate("q-prefill-p-0"))["reason"] == "Draining"
    world.scheduler.instances["q-prefill-p-0"]["in_flight"] = 0

    async def is_gone() -> bool:
        return await world.pods("prefill") == ALL[2:]

    await world.until(is_gone, "leader and worker of the idle one are gone")


@pytest.fixture
def disruption_budgets(api_server: ApiServer) -> Iterator[None]:
    with api_server.disruption_budgets():
        yield


def evict(api_server: ApiServer, namespace: str, pod: str) -> int:
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
        "deleteOptions": {"gracePeriodSeconds": 30},
    }
    try:
        api_server.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)
    except urllib.error.HTTPError as error:
        return error.code
    return 201


@pytest.mark.usefixtures("disruption_budgets")
async def test_two_evictions_do_not_break_two_instances_where_one_may_be_missing(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    await world.bring_up(of_two_pods)
    budget = f"/apis/policy/v1/namespaces/{world.namespace}/poddisruptionbudgets/q-prefill"

    async def one_may_go() -> bool:
        status = (await asyncio.to_thread(api_server.request, "GET", budget)).get("status", {})
        return bool(status.get("disruptionsAllowed") == 1 and status.get("currentHealthy") == 4)

    await world.until(one_may_go, "the budget knows its Pods", steps=300)
    before = await world.uids("prefill")
    world.nodes.stuck.add("q-prefill-p-0-w1")  # its preStop waits for the work in flight
    assert evict(api_server, world.namespace, "q-prefill-p-0-w1") == 201
    for other in ("q-prefill-p-1", "q-prefill-p-1-w1"):
        assert evict(api_server, world.namespace, other) == 429, "one instance is missing already"

    await world.reconcile()
    leader = await world.get("Pod", "q-prefill-p-0")
    assert leader is not None
    assert is_terminating(leader), "it is told at once, so that both empty the instance together"
    world.nodes.stuck.clear()

    async def is_new() -> bool:
        pods = await prefill(world)
        instances = {name.removesuffix("-w1") for name in pods}
        return len(pods) == 4 and "q-prefill-p-0" not in instances and await world.is_ready()

    await world.until(is_new, "another instance stands in its place")
    now = await world.uids("prefill")
    assert before["q-prefill-p-0"] not in now.values(), "the leader went with its worker"
    assert [now[name] for name in ALL[2:]] == [before[name] for name in ALL[2:]]
    await world.until(one_may_go, "and then the next one may go", steps=300)


async def test_a_foreign_pod_of_a_workers_name_is_left_alone_and_another_number_is_taken(
    world: PlayedWorld,
) -> None:
    foreign: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "q-prefill-p-0-w1", "namespace": world.namespace},
        "spec": {"containers": [{"name": "c", "image": "mine"}]},
    }
    made = await world.client.create(foreign, manager="test")
    await world.bring_up(of_two_pods)
    live = await world.get("Pod", "q-prefill-p-0-w1")
    assert live is not None
    assert uid_of(live) == uid_of(made)
    leaders = [name for name in await world.pods("prefill") if not name.endswith("-w1")]
    assert leaders == ["q-prefill-p-1", "q-prefill-p-2"]
    degraded = await world.condition("Degraded", "MooncakePrefillPool", "q-prefill")
    assert degraded["reason"] == "ForeignPod"
    assert "q-prefill-p-0-w1" in degraded["message"]
