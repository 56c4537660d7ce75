"""How instances fail: what other operators' users met (docs/peers-problems.md), and what must happen."""

from __future__ import annotations

from typing import Any

from mooncake_operator.kube.resources import CLUSTER, EVENT, POD, Object
from mooncake_testing.played_world import PlayedWorld

CRASHED = {
    "phase": "Failed",
    "containerStatuses": [
        {
            "name": "engine",
            "ready": False,
            "restartCount": 0,
            "image": "none",
            "imageID": "",
            "state": {
                "terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "CUDA out of memory"}
            },
        }
    ],
}


async def pool_status(world: PlayedWorld) -> Any:
    pool = await world.get("MooncakeDecodePool", "q-decode")
    assert pool is not None
    return pool["status"]


async def test_an_instance_that_crashes_again_and_again_waits_longer_and_its_last_words_are_kept(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    world.nodes.broken.add("q-decode-d-0")
    for failures, wait_s in ((1, 0), (2, 30), (3, 60), (4, 120), (5, 240)):
        await world.nodes.set_status("q-decode-d-0", CRASHED)
        await world.reconcile()  # on record …
        assert (await pool_status(world))["recreations"][0]["failures"] == failures
        await world.step()
        await world.step()  # … then gone
        if wait_s:
            assert await world.pods("decode") == ["q-decode-d-1"]
            world.passed_s += wait_s - 5
            await world.step()
            assert await world.pods("decode") == ["q-decode-d-1"], f"failure {failures} waits {wait_s} s"
            world.passed_s += 6
            await world.step()
        assert await world.pods("decode") == ["q-decode-d-0", "q-decode-d-1"]
    kept = (await pool_status(world))["lastFailures"]
    assert len(kept) == 5
    assert "OOMKilled" in kept[0]["message"]
    assert "exited with 137, CUDA out of memory" in kept[0]["message"]
    assert "on node-0" in kept[-1]["message"]


async def test_an_instance_whose_node_is_dead_gives_its_place_away_and_is_told_of(world: PlayedWorld) -> None:
    await world.bring_up()
    pod = await world.get("Pod", "q-decode-d-0")
    assert pod is not None
    # What the node lifecycle controller does: it deletes, and no kubelet confirms.
    world.nodes.stuck = {"q-decode-d-0"}
    await world.client.delete(POD, world.namespace, "q-decode-d-0", uid=pod["metadata"]["uid"], grace_s=30)

    async def has_another() -> bool:
        return await world.routable("decode") == ["q-decode-d-1", "q-decode-d-2"]

    await world.until(has_another, "another instance takes its place")
    world.passed_s = 30 + 300 + 30
    await world.step()
    degraded = await world.condition("Degraded", "MooncakeDecodePool", "q-decode")
    assert (degraded["status"], degraded["reason"]) == ("True", "NeverTerminates")
    assert "q-decode-d-0" in degraded["message"]
    for _ in range(3):
        await world.step()
    assert await world.get("Pod", "q-decode-d-0"), "force is the user's to use"
    assert await world.is_ready()


async def test_gpus_of_a_pod_that_never_ends_are_given_away_after_a_limit_and_not_before(
    world: PlayedWorld,
) -> None:
    def with_budget(spec: Any) -> None:
        for pools in ("prefillPools", "decodePools"):
            spec[pools][0]["resources"] = {"gpu": {"count": 1}}
        spec["coordination"] = {"gpuBudget": 4}

    await world.bring_up(with_budget)
    pod = await world.get("Pod", "q-decode-d-0")
    assert pod is not None
    world.nodes.stuck = {"q-decode-d-0"}
    await world.client.delete(POD, world.namespace, "q-decode-d-0", uid=pod["metadata"]["uid"], grace_s=30)
    for _ in range(5):
        await world.step()
    assert await world.routable("decode") == ["q-decode-d-1"], "its GPU may still be held"
    world.passed_s = 400

    async def has_another() -> bool:
        return len(await world.routable("decode")) == 2

    await world.until(has_another, "the limit is over")


async def test_a_pod_that_a_finalizer_holds_neither_stops_a_rollout_nor_a_deletion(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    held = {"metadata": {"finalizers": ["test.mooncake.io/hold"]}}
    await world.client.patch(POD, world.namespace, "q-decode-d-0", held, how="merge", manager="test")
    await world.nodes.set_status("q-decode-d-0", CRASHED)
    for _ in range(5):
        await world.step()
    world.passed_s = 700

    async def has_another() -> bool:
        return len(await world.routable("decode")) == 2

    await world.until(has_another, "another instance takes its place")
    pool = await world.get("MooncakeDecodePool", "q-decode")
    cluster = await world.get("MooncakeCluster", "q")
    assert pool is not None
    assert cluster is not None
    await world.client.delete(CLUSTER, world.namespace, "q", uid=cluster["metadata"]["uid"])
    world.passed_s = 3000

    async def is_let_go() -> bool:
        found = await world.get("MooncakeDecodePool", "q-decode")
        return found is None or not found["metadata"].get("finalizers")

    await world.until(is_let_go, "no finalizer of ours outlives its deadline", 100)
    left = await world.get("Pod", "q-decode-d-0")
    if left is not None:
        free = {"metadata": {"finalizers": None}}
        await world.client.patch(POD, world.namespace, "q-decode-d-0", free, how="merge", manager="test")


async def test_events_tell_of_a_failure_once(world: PlayedWorld) -> None:
    await world.bring_up()
    await world.nodes.set_status("q-decode-d-0", CRASHED)
    for _ in range(6):
        await world.step()
    events: list[Object] = await world.client.list_all(EVENT, world.namespace)
    told = [event for event in events if event["reason"] == "InstanceFailed"]
    assert len(told) == 1
    assert "OOMKilled" in told[0]["note"]


async def test_a_cluster_without_a_prefill_instance_is_not_ready_though_decode_serves(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    for name in await world.pods("prefill"):
        world.nodes.broken.add(name)
        await world.nodes.set_status(name, CRASHED)
    for _ in range(4):
        await world.step()
    assert await world.routable("prefill") == []
    assert len(await world.routable("decode")) == 2
    ready = await world.condition("Ready")
    assert ready["status"] == "False"
    assert "pool q-prefill: 0 of 2 instances are routable" in ready["message"]
