"""Whoever takes an engine's Pod away, politely, takes no stream with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from e2e.installation import Operator
from e2e.kube import Kube, eventually, is_true
from e2e.served import Manifest, ServedCluster, Serving, serving
from e2e.under_test import ClusterUnderTest

REPLICAS = 2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400, func_only=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="serving")
async def _serving(
    cluster: ClusterUnderTest, operator: Operator, module_kube: Kube, module_namespace: str
) -> AsyncIterator[Serving]:
    async with serving(cluster, module_kube, module_namespace, REPLICAS) as found:
        yield found


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_deleted_engine_goes_when_its_streams_have_ended(
    serving: Serving, cluster: ClusterUnderTest, role: str
) -> None:
    kimi, load = serving.cluster, serving.load
    victim = await _at_work(kimi, role)

    await cluster.kubectl("delete", "pod", victim, "-n", kimi.namespace, "--wait=false")

    async def is_gone() -> bool:
        return all(pod["metadata"]["name"] != victim for pod in await kimi.pods(role=role))

    await eventually(f"{victim} is gone", is_gone)
    await kimi.ready()
    await load.more(10)
    load.must_hold()


async def test_a_drained_node_gives_its_pods_away_one_by_one_and_no_stream_is_lost(
    serving: Serving, cluster: ClusterUnderTest, module_kube: Kube
) -> None:
    kimi, load = serving.cluster, serving.load
    before = {pod["metadata"]["uid"]: pod for pod in await kimi.live_pods()}
    node = next(pod["spec"]["nodeName"] for pod in before.values() if _role(pod) == "decode")
    affected = {uid for uid, pod in before.items() if pod["spec"]["nodeName"] == node}

    async with _drain(cluster, module_kube, kimi, node) as draining:
        # Where there is no other node, replacements wait for this one, and the budgets hold the others back.
        await eventually("replacements wait", lambda: _waits(kimi, "decode"))
        for role in ("prefill", "decode", "scheduler"):
            there = [pod for pod in await kimi.live_pods(role=role) if is_true(pod, "Ready")]
            assert len(there) >= REPLICAS - 1, role
        await load.more(10)
        await cluster.kubectl("uncordon", node)
        await asyncio.wait_for(draining, 500)

    after = {pod["metadata"]["uid"] for pod in await kimi.live_pods()}
    assert not affected & after
    await kimi.ready()
    await load.more(10)
    load.must_hold()


@asynccontextmanager
async def _drain(
    cluster: ClusterUnderTest, kube: Kube, kimi: ServedCluster, node: str
) -> AsyncIterator["asyncio.Task[str]"]:
    """``kubectl drain``, of this MooncakeCluster's Pods only: the operator stays."""
    selector = f"--pod-selector=mooncake.io/cluster={kimi.name}"
    arguments = ("drain", node, selector, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=400s")
    draining = asyncio.create_task(cluster.kubectl(*arguments))
    try:
        yield draining
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await kube.patch("Node", node, {"spec": {"unschedulable": None}})


async def _waits(kimi: ServedCluster, role: str) -> bool:
    return any("nodeName" not in pod["spec"] for pod in await kimi.live_pods(role=role))


async def _at_work(kimi: ServedCluster, role: str) -> str:
    """An instance with requests in hand."""
    found = ""

    async def some_is() -> bool:
        nonlocal found
        views = (await kimi.instances()).values()
        busy = [v["id"] for v in views if v["role"] == role and any((v.get("load") or {}).values())]
        found = busy[0] if busy else ""
        return bool(busy)

    await eventually(f"a {role} instance works", some_is, every_s=0.05)
    return found


def _role(pod: Manifest) -> str:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return labels["mooncake.io/role"]
