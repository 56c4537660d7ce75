"""What goes, and when: on a whole control plane, with its garbage collector, evictions and namespaces."""

import asyncio
from typing import Any

import pytest

from e2e.installation import Operator
from e2e.kube import PATIENCE_S, Kube, condition, eventually, is_true
from e2e.played_kubelet import Behaviour, PlayedNodes
from e2e.small_cluster import NAME, SHAPE, engines, manifest, removed_afterwards, working

KINDS = ("MooncakeCluster", "MooncakePrefillPool", "MooncakeDecodePool", "MooncakeKVCachePool")

pytestmark = pytest.mark.timeout(1200, func_only=True)


async def apply_and_await(kube: Kube, namespace: str, document: dict[str, Any]) -> None:
    """Apply a cluster; returns when all its engines' containers run."""
    await kube.apply_all([document], namespace)

    async def run() -> bool:
        counts = {role: len(await working(kube, namespace, role)) for role in ("prefill", "decode")}
        spec = document["spec"]
        wanted = {
            "prefill": spec["prefillPools"][0]["replicas"],
            "decode": spec["decodePools"][0]["replicas"],
        }
        assert counts == wanted
        return True

    await eventually("the engines run", run, every_s=0.5)


async def left_over(kube: Kube, namespace: str) -> list[str]:
    """What of ours is still there."""
    return [
        f"{kind}/{obj['metadata']['name']} {obj['metadata'].get('finalizers', [])}"
        for kind in (*KINDS, "Pod", "Service", "ConfigMap", "Secret", "Deployment", "ControllerRevision")
        for obj in await kube.list_all(kind, namespace)
        if kind in KINDS or "mooncake.io/cluster" in (obj["metadata"].get("labels") or {})
    ]


async def is_empty(kube: Kube, namespace: str) -> bool:
    assert await left_over(kube, namespace) == []
    return True


async def test_a_namespace_that_is_deleted_with_running_engines_ends_and_holds_no_finalizer(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    await apply_and_await(kube, namespace, manifest(decode=1, drain_s=60, played=False))
    pool = await kube.get("MooncakeDecodePool", f"{NAME}-decode", namespace)
    assert pool["metadata"]["finalizers"] == ["mooncake.io/drain"]
    pods = await kube.list_all("Pod", namespace)
    grace_s = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods)
    await kube.delete("Namespace", namespace)

    async def is_gone() -> bool:
        return await kube.find("Namespace", namespace) is None

    # Pods go first, and the namespace controller looks again after half of their longest grace period.
    await eventually("the namespace is gone", is_gone, within_s=PATIENCE_S + grace_s / 2, every_s=1)


async def test_a_foreground_deletion_makes_no_pod_and_leaves_nothing(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    async with PlayedNodes(kube, 2, shape=SHAPE):
        await apply_and_await(kube, namespace, manifest())
        known = {pod["metadata"]["uid"] for pod in (await engines(kube, namespace)).values()}
        _, version = await kube.snapshot("Pod", namespace)
        added: list[str] = []

        async def record() -> None:
            async for kind, pod in kube.watch("Pod", version, namespace):
                if kind == "ADDED":
                    added.append(pod["metadata"]["name"])

        recording = asyncio.create_task(record())
        try:
            await kube.delete("MooncakeCluster", NAME, namespace, propagation="Foreground")
            await eventually("all is gone", lambda: is_empty(kube, namespace))
        finally:
            recording.cancel()
    assert known
    assert added == []


async def test_instances_of_a_node_that_vanished_are_replaced_and_the_node_may_come_back(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    async with PlayedNodes(kube, 2, shape=SHAPE) as played, removed_afterwards(kube, namespace):
        await apply_and_await(kube, namespace, manifest(decode=4))
        lost, kept = played.names
        played.vanish(lost)

        async def have_moved() -> bool:
            pods = await engines(kube, namespace)
            assert len(await working(kube, namespace)) >= 4
            serving = [
                pod["spec"]["nodeName"] for pod in pods.values() if "deletionTimestamp" not in pod["metadata"]
            ]
            assert serving == [kept] * 4
            return True

        # 20 s until the node counts as lost, 5 s of toleration.
        await eventually("four instances serve on the other node", have_moved)
        await played.come_back(lost)

        async def is_settled() -> bool:
            assert len(await engines(kube, namespace)) == 4
            return True

        await eventually("nothing is left on the node that is back", is_settled)


async def test_instances_that_never_end_hold_a_deleted_cluster_for_its_deadline_and_no_longer(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    async with PlayedNodes(kube, 1, script=lambda _: Behaviour(stop_s=None), shape=SHAPE):
        await apply_and_await(kube, namespace, manifest(decode=1, drain_s=5))
        await kube.delete("MooncakeCluster", NAME, namespace)
        await asyncio.sleep(10)
        decode = await kube.find("MooncakeDecodePool", f"{NAME}-decode", namespace)
        assert decode is not None, "its Pods may still end"
        assert "deletionTimestamp" in decode["metadata"]

        async def pools_are_gone() -> bool:
            for kind in KINDS:
                assert await kube.list_all(kind, namespace) == []
            return True

        # Drain's timeout and a minute.
        await eventually("cluster and pools are gone", pools_are_gone)
        assert await engines(kube, namespace), "nobody was forced"


async def test_a_dead_node_is_told_of_in_the_pools_condition_until_the_pod_is_forced(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    stuck: set[str] = set()

    def script(pod: dict[str, Any]) -> Behaviour:
        return Behaviour(stop_s=None if pod["metadata"]["name"] in stuck else 0.0)

    stuck.add(f"{NAME}-decode-d-0")
    async with PlayedNodes(kube, 1, script=script, shape=SHAPE), removed_afterwards(kube, namespace):
        await apply_and_await(kube, namespace, manifest(decode=2))
        await kube.delete("Pod", f"{NAME}-decode-d-0", namespace, grace_s=1)

        async def is_replaced() -> bool:
            found = await working(kube, namespace)
            assert found == [f"{NAME}-decode-d-1", f"{NAME}-decode-d-2"]
            return True

        await eventually("another takes its place", is_replaced)
        assert f"{NAME}-decode-d-0" in await engines(kube, namespace)
        await kube.delete("Pod", f"{NAME}-decode-d-0", namespace, grace_s=0)

        async def is_settled() -> bool:
            pool = await kube.get("MooncakeDecodePool", f"{NAME}-decode", namespace)
            degraded = condition(pool, "Degraded")
            assert degraded is not None
            assert degraded["status"] == "False", degraded
            assert is_true(pool, "Scheduled")
            return len(await engines(kube, namespace)) == 2

        await eventually("the pool is well", is_settled)
