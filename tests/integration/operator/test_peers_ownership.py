"""Who owns what: what other operators' users met (docs/peers-problems.md), and what must happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.resources import (
    CLUSTER,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DECODE_POOL,
    OWNED,
    POD,
    POOLS,
    SERVICE,
    Object,
    controller_uid,
    name_of,
    uid_of,
)
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_nodes import PlayedScheduler
from mooncake_testing.played_world import PlayedWorld


async def everything(client: Client, namespace: str, owner: str) -> dict[tuple[str, str], str]:
    """All objects below a cluster, however deep, with their versions."""
    objects = [obj for kind in (*POOLS, *OWNED, POD) for obj in await client.list_all(kind, namespace)]
    uids = {owner}
    uids |= {uid_of(obj) for obj in objects if controller_uid(obj) in uids}
    return {
        (obj["kind"], name_of(obj)): obj["metadata"]["resourceVersion"]
        for obj in objects
        if controller_uid(obj) in uids
    }


async def live_cluster(world: PlayedWorld) -> Object:
    return await world.client.get(CLUSTER, world.namespace, world.cluster)


async def test_a_replaced_cluster_without_its_annotations_goes_on_in_the_middle_of_a_rollout(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    old = await world.uids("prefill") | await world.uids("decode")

    def edit(spec: Any) -> None:
        spec["engine"]["simulated"]["timeScale"] = 20

    await world.apply(edit)
    for _ in range(5):
        await world.step()
    for kind, name in [(CLUSTER, "q"), (DECODE_POOL, "q-decode")]:
        live = await world.client.get(kind, world.namespace, name)
        kept = {
            field: live["metadata"][field]
            for field in ("name", "namespace", "resourceVersion", "ownerReferences")
            if field in live["metadata"]
        }
        await world.client.replace({**live, "metadata": kept}, manager="kubectl-replace")

    async def is_over() -> bool:
        present = await world.uids("prefill") | await world.uids("decode")
        return len(present) == 4 and not old.items() & present.items() and await world.is_ready()

    await world.until(is_over, "the rollout ends", 120)


async def test_a_foreground_deletion_creates_nothing_and_ends(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    await world.bring_up()
    cluster = await live_cluster(world)
    path = CLUSTER.path(world.namespace, "q")
    api_server.request("DELETE", path, {"propagationPolicy": "Foreground"})
    made: list[tuple[str, str]] = []
    async with asyncio.timeout(180):
        while await world.get("MooncakeCluster", "q") is not None:
            await world.step()
            made += [write for write in world.writes if write[0] == "post" and write[1] != "events"]
            await asyncio.sleep(0.1)
    await world.step()
    assert made == []
    assert await everything(world.client, world.namespace, uid_of(cluster)) == {}


async def test_what_a_cluster_no_longer_asks_for_goes_and_nothing_else(world: PlayedWorld) -> None:
    await world.bring_up()
    assert len(await world.pods("redis")) == 1

    def without_redis(spec: Any) -> None:
        del spec["scheduler"]["redis"]
        spec["scheduler"]["replicas"] = 1

    await world.apply(without_redis)
    cluster = uid_of(await live_cluster(world))

    async def is_gone() -> bool:
        left = await everything(world.client, world.namespace, cluster)
        return not [name for _, name in left if name.startswith("q-redis")]

    await world.until(is_gone, "Pod, Service, Secret, policies and revisions of the Redis", 100)
    assert await world.get("Secret", "q-admin")


async def test_objects_with_our_labels_and_another_owner_or_none_are_left_alone(world: PlayedWorld) -> None:
    labels = {
        "app.kubernetes.io/managed-by": "mooncake-operator",
        "mooncake.io/cluster": "q",
        "mooncake.io/pool": "q-decode",
        "mooncake.io/planned-as": "q-decode",
        "mooncake.io/role": "decode",
        "mooncake.io/instance": "q-decode-d-0",
    }
    strangers: list[Object] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "1"}},
        {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 1}]}},
        {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "engine", "image": "mine"}]}},
        {"apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 9, "data": {"pod": {}}},
    ]
    made = []
    for stranger in strangers:
        metadata = {"name": "stranger", "namespace": world.namespace, "labels": labels}
        made.append(await world.client.create({**stranger, "metadata": metadata}, manager="test"))
    world.nodes.broken.add("stranger")
    await world.bring_up()
    await world.scale(1)
    for _ in range(6):
        await world.step()
    assert len(await world.pods("decode")) == 2, "an instance and the stranger"
    for kind, before in zip((CONFIG_MAP, SERVICE, POD, CONTROLLER_REVISION), made, strict=True):
        after = await world.client.get(kind, world.namespace, "stranger")
        assert uid_of(after) == uid_of(before)
        assert "ownerReferences" not in after["metadata"]
        assert "deletionTimestamp" not in after["metadata"]


async def test_objects_that_an_older_operator_left_without_status_and_revisions_are_taken_as_they_are(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    before = await world.uids("prefill") | await world.uids("decode") | await world.uids("redis")
    for revision in await world.client.list_all(CONTROLLER_REVISION, world.namespace):
        await world.client.delete(
            CONTROLLER_REVISION, world.namespace, name_of(revision), uid=uid_of(revision)
        )
    for kind in POOLS:
        for pool in await world.client.list_all(kind, world.namespace):
            gone = {"status": None}
            await world.client.patch(
                kind, world.namespace, name_of(pool), gone, how="merge", manager="test", subresource="status"
            )
    world.restart()
    for _ in range(4):
        await world.step()
    await world.until(world.is_ready, "it is Ready as before")
    after = await world.uids("prefill") | await world.uids("decode") | await world.uids("redis")
    assert after == before
    assert await world.client.list_all(CONTROLLER_REVISION, world.namespace), "they are on record again"


@pytest.fixture
async def neighbour(client: Client, namespace: str) -> AsyncIterator[PlayedWorld]:
    async with PlayedScheduler().serve() as scheduler:
        yield PlayedWorld(client, namespace, scheduler, "r")


async def test_two_clusters_of_one_namespace_never_touch_each_others_objects(
    world: PlayedWorld, neighbour: PlayedWorld
) -> None:
    await world.bring_up()
    await neighbour.bring_up()
    ours, theirs = await live_cluster(world), await live_cluster(neighbour)
    before = await everything(world.client, world.namespace, uid_of(theirs))
    assert len(before) > 10

    def smaller(spec: Any) -> None:
        del spec["kvCachePools"]
        spec["prefillPools"][0]["name"] = "fast"

    await world.apply(smaller)
    for _ in range(10):
        await world.step()
    assert await everything(world.client, world.namespace, uid_of(theirs)) == before
    await world.client.delete(CLUSTER, world.namespace, "q", uid=uid_of(ours))
    async with asyncio.timeout(180):
        while await everything(world.client, world.namespace, uid_of(ours)):
            await world.step()
            await asyncio.sleep(0.1)
    await neighbour.step()
    assert await neighbour.is_ready()
    assert await everything(world.client, world.namespace, uid_of(theirs)) == before


async def test_two_clusters_whose_pools_would_bear_one_name_do_not_take_it_from_each_other(
    world: PlayedWorld, client: Client, namespace: str
) -> None:
    def name_pool(name: str) -> Any:
        def change(spec: Any) -> None:
            spec["prefillPools"][0]["name"] = name

        return change

    await world.apply(name_pool("x-y"))
    await world.reconcile()
    first = await world.get("MooncakePrefillPool", "q-x-y")
    assert first is not None
    async with PlayedScheduler().serve() as scheduler:
        other = PlayedWorld(client, namespace, scheduler, "q-x")
        await other.apply(name_pool("y"))
        for _ in range(3):
            await other.reconcile()
            await world.reconcile()
        ready = await other.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "NameTaken")
        assert "MooncakePrefillPool q-x-y exists and is not this cluster's" in ready["message"]
        await other.reconcile()
        assert not [write for write in other.writes if write[1] == "mooncakeprefillpools"]
    after = await world.get("MooncakePrefillPool", "q-x-y")
    assert after is not None
    assert after["metadata"]["ownerReferences"] == first["metadata"]["ownerReferences"]
    assert after["spec"] == first["spec"]
