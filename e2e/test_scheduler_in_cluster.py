"""The schedulers' own comings and goings, and what they, their Redis and the gates mean to each other."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from e2e.installation import Operator
from e2e.kube import Kube, condition, eventually
from e2e.rollout_watch import RolloutWatch
from e2e.served import Manifest, ServedCluster, Serving, changed, serving
from e2e.under_test import ClusterUnderTest

REPLICAS = 2
ROLES = ("prefill", "decode")
GATE = "mooncake.io/routable"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400, func_only=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="serving")
async def _serving(
    cluster: ClusterUnderTest, operator: Operator, module_kube: Kube, module_namespace: str
) -> AsyncIterator[Serving]:
    async with serving(cluster, module_kube, module_namespace, REPLICAS) as found:
        yield found


async def test_a_restart_of_the_schedulers_loses_no_stream(
    serving: Serving, cluster: ClusterUnderTest
) -> None:
    before = await _schedulers(serving.cluster)
    deployment = f"deployment/{serving.cluster.name}-scheduler"

    await cluster.kubectl("rollout", "restart", deployment, "-n", serving.cluster.namespace)
    await cluster.kubectl("rollout", "status", deployment, "-n", serving.cluster.namespace, "--timeout=400s")

    await _all_went(serving, before)


async def test_a_changed_configuration_replaces_the_schedulers_and_loses_no_stream(serving: Serving) -> None:
    before = await _schedulers(serving.cluster)

    await serving.cluster.apply(
        changed(serving.cluster.manifest, "scheduler.routing.balancingThreshold", "2.5")
    )

    await _all_went(serving, before)


async def test_schedulers_are_scaled_up_and_down_under_load(serving: Serving) -> None:
    for replicas in (3, 1, 2):
        await serving.cluster.apply(changed(serving.cluster.manifest, "scheduler.replicas", replicas))

        async def are_there(wanted: int = replicas) -> bool:
            return len(await _schedulers(serving.cluster)) == wanted

        await eventually(f"there are {replicas} schedulers", are_there)
        await serving.cluster.ready()
        await serving.load.more(20)


async def test_a_redis_that_dies_under_load_costs_no_request_and_no_gate(serving: Serving) -> None:
    kimi = serving.cluster
    (redis,) = await kimi.live_pods(role="redis")
    before = _gates(serving.watch)

    await kimi.kube.delete("Pod", redis["metadata"]["name"], kimi.namespace, grace_s=0)
    await serving.load.more(30)

    async def is_back() -> bool:
        others = [p for p in await kimi.live_pods(role="redis") if p["metadata"]["uid"] != _uid(redis)]
        states = {each["state"] for each in (await kimi.instances()).values() if each["role"] in ROLES}
        return bool(others) and states == {"ready"} and len(await kimi.instances()) >= 2 * REPLICAS

    await eventually("another Redis knows all instances again", is_back)
    await serving.load.more(20)
    assert _gates(serving.watch) == before


async def test_a_drain_mark_closes_the_gate_and_taking_it_away_opens_it(serving: Serving) -> None:
    kimi = serving.cluster
    pod = (await kimi.live_pods(role="decode"))[0]["metadata"]["name"]

    await kimi.drain(pod)
    await eventually(f"{pod} is not routable", lambda: _gate_is(kimi, pod, "False"))
    gate = condition(await kimi.get("Pod", pod), GATE)
    assert gate is not None
    assert gate["reason"] == "DrainedByUser"

    await kimi.drain(pod, end=True)
    await eventually(f"{pod} is routable again", lambda: _gate_is(kimi, pod, "True"))
    await serving.load.more(10)


async def test_budgets_and_network_policies_select_the_pods_they_are_meant_for(serving: Serving) -> None:
    kimi = serving.cluster
    expected = {
        "kimi-prefill": (REPLICAS - 1, REPLICAS),
        "kimi-decode": (REPLICAS - 1, REPLICAS),
        "kimi-scheduler": (1, 2),
    }

    async def count() -> bool:
        budgets = await kimi.kube.list_all("PodDisruptionBudget", kimi.namespace)
        seen = {
            b["metadata"]["name"]: (b["status"]["desiredHealthy"], b["status"]["currentHealthy"])
            for b in budgets
            if b["status"].get("observedGeneration") == b["metadata"]["generation"]
        }
        assert seen == expected
        return True

    await eventually("the disruption controller counts instances", count)
    policies = {
        policy["metadata"]["name"]: await _selected(kimi, policy["spec"]["podSelector"])
        for policy in await kimi.kube.list_all("NetworkPolicy", kimi.namespace)
    }
    assert policies == {
        "kimi-scheduler": {"scheduler"},
        "kimi-engines": {"prefill", "decode"},
        "kimi-store": {"store-master", "store-node"},
        "kimi-redis": {"redis"},
    }


async def test_gates_stay_open_while_no_scheduler_lives(serving: Serving) -> None:
    kimi = serving.cluster
    await serving.load.stop()
    serving.load.must_hold()
    before = _gates(serving.watch)
    dead = await kimi.live_pods(role="scheduler")

    for pod in [*dead, *await kimi.live_pods(role="redis")]:
        await kimi.kube.delete("Pod", pod["metadata"]["name"], kimi.namespace, grace_s=0)

    async def are_replaced() -> bool:
        names = {pod["metadata"]["name"] for pod in await kimi.live_pods(role="scheduler")}
        return len(names) == len(dead) and not names & {pod["metadata"]["name"] for pod in dead}

    await eventually("other schedulers are there", are_replaced)
    await kimi.ready()
    assert _gates(serving.watch) == before


async def _all_went(serving: Serving, before: set[str]) -> None:
    """Those schedulers are gone, others serve, and every request was answered as promised."""

    async def are_gone() -> bool:
        left = {_uid(pod) for pod in await serving.cluster.pods(role="scheduler")} & before
        assert not left
        return True

    await eventually("all schedulers are replaced", are_gone)
    await serving.cluster.ready()
    await serving.load.more(20)


async def _schedulers(cluster: ServedCluster) -> set[str]:
    return {_uid(pod) for pod in await cluster.live_pods(role="scheduler")}


def _uid(pod: Manifest) -> str:
    uid: str = pod["metadata"]["uid"]
    return uid


def _gates(watch: RolloutWatch) -> int:
    """All changes of gates so far."""
    assert sum(sum(watch.now.routable[role].values()) for role in ROLES) == 2 * REPLICAS
    return len(watch.history)


async def _gate_is(cluster: ServedCluster, pod: str, status: str) -> bool:
    found = condition(await cluster.get("Pod", pod), GATE)
    return found is not None and found["status"] == status


async def _selected(cluster: ServedCluster, selector: dict[str, Any]) -> set[str]:
    """Roles of the Pods that a label selector matches."""
    exact = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    among = [f"{e['key']} in ({','.join(e['values'])})" for e in selector.get("matchExpressions", ())]
    pods = await cluster.kube.list_all("Pod", cluster.namespace, labels=",".join([*exact, *among]))
    return {pod["metadata"]["labels"]["mooncake.io/role"] for pod in pods}
