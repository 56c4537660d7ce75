"""Instances of two Pods on a real node: they serve, end as a whole, and lose no stream to an eviction."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from e2e.installation import Operator
from e2e.kube import Kube, eventually, is_true

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "multi-pod.yaml"
LEADER, WORKER = "big-prefill-p-0", "big-prefill-p-0-w1"
DRAIN_S = 40
_KILL_ENGINE = """
import os, pathlib, signal
(engine,) = (
    place.parent.name
    for place in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    if b"--headless" in place.read_bytes().split(b"\\0")
)
os.kill(int(engine), signal.SIGKILL)
"""
"""kill -9 of the engine that has joined a leader, from inside its Pod."""

pytestmark = pytest.mark.timeout(1200, func_only=True)


def manifest() -> dict[str, Any]:
    """The example, with a decode instance of two Pods as well."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    for pool in (*document["spec"]["prefillPools"], *document["spec"]["decodePools"]):
        pool["drain"] = {"timeoutSeconds": DRAIN_S}
    decode = document["spec"]["decodePools"][0]
    decode["instance"] = {"size": 2, "parallelism": {"tensor": 2}}
    return document


async def ready(kube: Kube, namespace: str) -> None:
    """Wait until the cluster is Ready."""

    async def is_ready() -> bool:
        found = await kube.get("MooncakeCluster", "big", namespace)
        return is_true(found, "Ready")

    await eventually("the cluster is Ready", is_ready, every_s=1)


@pytest_asyncio.fixture
async def big(operator: Operator, kube: Kube, namespace: str) -> AsyncIterator[str]:
    """The cluster, Ready, in a namespace; gone before that is deleted.

    A namespace with Pods in it is looked at again only after half of their longest grace.
    """
    await kube.apply_all([manifest()], namespace)
    await ready(kube, namespace)
    yield namespace
    await kube.delete("MooncakeCluster", "big", namespace)

    async def are_gone() -> bool:
        return not await kube.list_all("Pod", namespace)

    await eventually("its Pods are gone", are_gone, every_s=1)


async def uids(kube: Kube, namespace: str, role: str) -> dict[str, str]:
    """Pods of a role by name."""
    pods = await kube.list_all("Pod", namespace, labels=f"mooncake.io/role={role}")
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


async def complete(session: aiohttp.ClientSession, url: str, tokens: int) -> dict[str, Any]:
    """A completion, whole."""
    body = {"model": "kimi-k2", "prompt": [7] * 2000, "max_tokens": tokens, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        document: dict[str, Any] = json.loads(text)
        return document


async def is_another(kube: Kube, namespace: str, role: str, before: dict[str, str]) -> bool:
    """Whether all Pods of the one instance of a role are others than before."""
    now = await uids(kube, namespace, role)
    return len(now) == 2 and not {*now.values()} & {*before.values()}


async def test_an_instance_of_two_pods_serves_and_is_recreated_as_a_whole(
    operator: Operator, kube: Kube, big: str
) -> None:
    namespace = big
    cluster = operator.cluster
    before = await uids(kube, namespace, "prefill")
    assert sorted(before) == [LEADER, WORKER]
    async with (
        cluster.forward(kube, "big-scheduler", namespace, 80) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        answer = await complete(session, url, 8)
        assert answer["usage"]["completion_tokens"] == 8

        await cluster.kubectl("exec", WORKER, "-n", namespace, "--", "python3", "-c", _KILL_ENGINE)

        async def is_new() -> bool:
            return await is_another(kube, namespace, "prefill", before)

        await eventually("leader and worker are others", is_new, every_s=1)
        pool = await kube.get("MooncakePrefillPool", "big-prefill", namespace)
        (failure,) = pool["status"]["lastFailures"]
        assert failure["instance"] == LEADER
        await ready(kube, namespace)
        assert (await complete(session, url, 8))["usage"]["completion_tokens"] == 8


async def test_a_worker_that_is_evicted_ends_after_the_streams_of_its_instance(
    operator: Operator, kube: Kube, big: str
) -> None:
    namespace = big
    before = await uids(kube, namespace, "decode")
    async with (
        operator.cluster.forward(kube, "big-scheduler", namespace, 80) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DRAIN_S)) as session,
    ):
        tokens = 6000
        body = {"model": "kimi-k2", "prompt": [7] * 500, "max_tokens": tokens, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as stream:
            first = await stream.content.readline()
            assert first.startswith(b"data: "), first
            await evict(kube, namespace, "big-decode-d-0-w1")
            rest = (await stream.content.read()).decode()
        assert rest.rstrip().endswith("data: [DONE]"), rest[-500:]
        assert '"finish_reason":"length"' in rest

    async def is_new() -> bool:
        return await is_another(kube, namespace, "decode", before)

    await eventually("the whole instance is another", is_new, every_s=1)
    await ready(kube, namespace)


async def evict(kube: Kube, namespace: str, pod: str) -> None:
    """What `kubectl drain` does to each Pod of a node."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    await kube.call("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)
