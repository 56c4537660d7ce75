"""Who says how many: what other operators' users met (docs/peers-problems.md), and what must happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mooncake_operator.kube.resources import DECODE_POOL, POD, Object, name_of
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_world import PlayedWorld

NO_NODE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        }
    ],
}


async def declared(world: PlayedWorld) -> tuple[int, int]:
    """What `q-decode` is to have, and what its cluster said of it last."""
    pool = await world.client.get(DECODE_POOL, world.namespace, "q-decode")
    return pool["spec"]["replicas"], pool["spec"]["declaredReplicas"]


def scale_of(server: ApiServer, world: PlayedWorld) -> Any:
    """What an autoscaler reads."""
    return server.request("GET", DECODE_POOL.path(world.namespace, "q-decode", "scale"))


def inline(number: int | None) -> Callable[[Any], None]:
    def change(spec: Any) -> None:
        spec["decodePools"][0].pop("replicas", None)
        if number is not None:
            spec["decodePools"][0]["replicas"] = number

    return change


async def test_replicas_are_the_last_wish_whoever_said_it(world: PlayedWorld) -> None:
    await world.apply()
    await world.reconcile()
    assert await declared(world) == (2, 2)
    await world.scale(2)
    await world.apply()
    await world.reconcile()
    assert await declared(world) == (2, 2), "scaling to the present value changes nothing"
    await world.apply(inline(3))
    await world.reconcile()
    assert await declared(world) == (3, 3), "nor does it keep the cluster's author from editing the number"
    await world.scale(5)
    await world.apply(inline(3))
    await world.reconcile()
    assert await declared(world) == (5, 3), "an applied cluster that says nothing new is no wish"
    await world.apply(inline(4))
    await world.reconcile()
    assert await declared(world) == (4, 4)


async def test_replicas_that_were_never_written_stay_with_the_autoscaler(world: PlayedWorld) -> None:
    await world.apply(inline(None))
    await world.reconcile()
    assert await declared(world) == (1, 1)
    await world.scale(6)
    for _ in range(2):
        await world.apply(inline(None))
        await world.reconcile()
    assert await declared(world) == (6, 1)


async def test_an_autoscaler_that_writes_while_the_operator_works_is_never_overwritten(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    for number in (3, 4, 2, 5, 3, 1, 4, 2, 3, 4):
        await asyncio.gather(world.reconcile(), world.scale(number), world.apply())
        assert (await declared(world))[0] == number
        await world.step()
        assert (await declared(world))[0] == number
    await world.until(world.is_ready, "four instances", 100)

    async def are_four() -> bool:
        return len(await world.pods("decode")) == 4

    await world.until(are_four, "the last number")


async def test_the_scale_of_a_pool_counts_instances_and_selects_their_leaders(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    await world.bring_up()
    await world.scale(3)

    async def grown() -> bool:
        return len(await world.routable("decode")) == 3

    await world.until(grown, "three instances")
    await world.step()
    scale = scale_of(api_server, world)
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
    labels = dict(part.split("=") for part in scale["status"]["selector"].split(","))
    selected = await world.client.list_all(POD, world.namespace, labels=labels)
    assert sorted(map(name_of, selected)) == ["q-decode-d-0", "q-decode-d-1", "q-decode-d-2"]


async def test_a_burst_of_scale_writes_is_one_change_and_restarts_nothing(world: PlayedWorld) -> None:
    await world.bring_up()
    before = await world.uids("prefill") | await world.uids("decode")
    deletions: list[tuple[str, str]] = []
    for number in (3, 4, 5, 4, 5, 6):
        await world.scale(number)
        await world.reconcile()
        deletions += [write for write in world.writes if write == ("delete", "pods")]
    # The fourth write took one back that had not begun to work; nothing else may go.
    assert len(deletions) <= 1
    await world.until(world.is_ready, "six instances")
    after = await world.uids("prefill") | await world.uids("decode")
    assert before.items() <= after.items()
    assert len(await world.pods("decode")) == 6


async def test_an_instance_that_finds_no_node_is_told_of_and_is_the_first_to_go(world: PlayedWorld) -> None:
    await world.bring_up()
    before = await world.uids("decode")
    world.nodes.trouble = lambda pod: NO_NODE
    await world.scale(3)
    for _ in range(3):
        await world.step()
    scheduled = await world.condition("Scheduled", "MooncakeDecodePool", "q-decode")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "InsufficientGPU")
    await world.scale(2)
    for _ in range(3):
        await world.step()
    assert await world.uids("decode") == before
    assert world.scheduler.calls == [], "nothing that works was asked to drain"
    assert await world.is_ready()


async def test_a_store_grows_by_one_node_at_a_time(world: PlayedWorld) -> None:
    await world.bring_up()

    def nodes(number: int) -> Callable[[Any], None]:
        def change(spec: Any) -> None:
            spec["kvCachePools"][0]["replicas"] = number

        return change

    async def present() -> list[str]:
        found = await world.client.list_all(POD, world.namespace)
        return sorted(name_of(pod) for pod in found if name_of(pod).startswith("q-kv-kv-"))

    await world.apply(nodes(3))
    counts = []
    for _ in range(8):
        await world.step()
        counts.append(len(await present()))
    world.passed_s += 61
    for _ in range(8):
        await world.step()
        counts.append(len(await present()))
    assert counts[7] <= 2, "the second has time to fill before the third draws all writes"
    assert max(counts) <= 3
    world.passed_s += 61
    await world.until(world.is_ready, "three nodes")
    assert len(await present()) == 3


async def test_a_pool_of_its_own_is_scaled_by_its_owner_alone(world: PlayedWorld) -> None:
    await world.apply()
    await world.reconcile()
    pool: Object = {
        "apiVersion": DECODE_POOL.api_version,
        "kind": "MooncakeDecodePool",
        "metadata": {"name": "extra", "namespace": world.namespace},
        "spec": {"clusterRef": {"name": "q"}, "replicas": 1},
    }
    await world.client.create(pool, manager="kubectl")
    await world.reconcile()
    body = {"spec": {"replicas": 3}}
    await world.client.patch(
        DECODE_POOL, world.namespace, "extra", body, how="merge", manager="hpa", subresource="scale"
    )
    await world.apply()
    for _ in range(2):
        await world.reconcile()
    live = await world.client.get(DECODE_POOL, world.namespace, "extra")
    assert live["spec"]["replicas"] == 3
    assert "declaredReplicas" not in live["spec"]
