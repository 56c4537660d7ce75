"""The chart on a real cluster: what is left when it goes, who takes over, what an upgrade does."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from e2e.installation import Operator
from e2e.kube import Kube, eventually, is_true
from e2e.under_test import ClusterUnderTest

_EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "quickstart.yaml"
_ASKED = {"model": "llama3-70b", "prompt": "Hello", "max_tokens": 4}
_POOLS = ("MooncakePrefillPool", "MooncakeDecodePool", "MooncakeKVCachePool")
_CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")
_NAMESPACED = (
    *("Deployment", "Pod", "Service", "ServiceAccount", "Role", "RoleBinding"),
    *("Job", "Lease", "Secret"),
)


@pytest_asyncio.fixture
async def serving(kube: Kube, operator: Operator, namespace: str) -> AsyncIterator[str]:
    """A small cluster that serves, of one instance a role; its namespace."""
    manifest: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    spec = manifest["spec"]
    for pools in ("prefillPools", "decodePools"):
        spec[pools][0] |= {"replicas": 1, "drain": {"timeoutSeconds": 20}}
    spec["scheduler"]["replicas"] = 1
    await kube.apply_all([manifest], namespace)
    await eventually("the cluster is Ready", lambda: _is_ready(kube, namespace))
    yield namespace
    # Whatever the test did: pools have finalizers, so that an operator must be there when the namespace goes.
    await asyncio.to_thread(operator.install)


@pytest.mark.timeout(1200, func_only=True)
async def test_uninstalling_leaves_what_serves_and_installing_again_takes_it_over(
    cluster: ClusterUnderTest, kube: Kube, operator: Operator, serving: str
) -> None:
    before = await _lives(kube, serving)
    assert any(await _finalizers(kube, serving))

    await asyncio.to_thread(operator.uninstall)

    assert await _left_of(kube, operator) == []
    assert is_true(await kube.get("CustomResourceDefinition", "mooncakeclusters.mooncake.io"), "Established")
    assert await _lives(kube, serving) == before
    assert not any(await _finalizers(kube, serving)), "without an operator nobody takes them off"
    assert await _completes(cluster, kube, serving)

    await asyncio.to_thread(operator.install)
    await eventually("finalizers are back", lambda: _all_have_finalizers(kube, serving))
    await kube.patch(
        "MooncakeDecodePool", "quickstart-decode", {"spec": {"replicas": 2}}, serving, subresource="scale"
    )
    await eventually("the pool is scaled", lambda: _routable(kube, serving, 2))
    now = await _lives(kube, serving)
    assert before.items() <= now.items(), "no Pod was made anew"


@pytest.mark.timeout(1200, func_only=True)
async def test_without_an_operator_a_cluster_can_be_deleted_and_nothing_stays(
    kube: Kube, operator: Operator, serving: str
) -> None:
    await asyncio.to_thread(operator.uninstall)

    await kube.delete("MooncakeCluster", "quickstart", serving)

    async def is_gone() -> bool:
        listed = [await kube.list_all(kind, serving) for kind in ("MooncakeCluster", *_POOLS, "Pod")]
        left = [f"{obj['kind']} {obj['metadata']['name']}" for objects in listed for obj in objects]
        assert not left, f"left: {left}"
        return True

    await eventually("the cluster and its Pods are gone", is_gone)


@pytest.mark.timeout(1200, func_only=True)
async def test_an_upgrade_hands_over_to_the_new_operator_and_restarts_nothing_that_serves(
    kube: Kube, operator: Operator, serving: str
) -> None:
    before = await _lives(kube, serving)

    await asyncio.to_thread(operator.install, {"operator": {"logLevel": "DEBUG", "replicas": 2}})

    deployment = await kube.get("Deployment", operator.name, operator.namespace)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "MOONCAKE_OPERATOR_LOG_LEVEL", "value": "DEBUG"} in container["env"]
    assert deployment["status"]["readyReplicas"] == 2

    async def one_of_them_leads() -> bool:
        lease = await kube.get("Lease", operator.name, operator.namespace)
        pods = await kube.list_all("Pod", operator.namespace, labels="app.kubernetes.io/component=operator")
        alive = [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return any(lease["spec"]["holderIdentity"].startswith(f"{name}-") for name in alive)

    await eventually("one of the new Pods holds the Lease", one_of_them_leads)
    assert await _lives(kube, serving) == before


async def test_users_of_a_namespace_may_write_clusters_there_and_only_look_as_viewers(
    cluster: ClusterUnderTest, operator: Operator
) -> None:
    async def may(role: str, verb: str, resource: str) -> bool:
        rules = yaml.safe_load(await cluster.kubectl("get", "clusterrole", role, "-o", "yaml"))["rules"]
        return any(
            "mooncake.io" in r["apiGroups"] and resource in r["resources"] and verb in r["verbs"]
            for r in rules
        )

    async def are_aggregated() -> bool:
        return await may("edit", "create", "mooncakeclusters")

    await eventually("the roles are aggregated", are_aggregated)
    assert await may("edit", "patch", "mooncakedecodepools/scale")
    assert await may("view", "list", "mooncakeclusters")
    assert not await may("view", "delete", "mooncakeclusters")


async def _is_ready(kube: Kube, namespace: str) -> bool:
    return is_true(await kube.get("MooncakeCluster", "quickstart", namespace), "Ready")


async def _routable(kube: Kube, namespace: str, number: int) -> bool:
    pool = await kube.get("MooncakeDecodePool", "quickstart-decode", namespace)
    return bool(pool["status"].get("routableReplicas") == number)


async def _lives(kube: Kube, namespace: str) -> dict[str, tuple[str, int]]:
    """Each Pod's uid, and how often its containers were restarted."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ())),
        )
        for pod in await kube.list_all("Pod", namespace)
    }


async def _finalizers(kube: Kube, namespace: str) -> list[list[str]]:
    pools = [pool for kind in _POOLS[:2] for pool in await kube.list_all(kind, namespace)]
    return [pool["metadata"].get("finalizers", []) for pool in pools]


async def _all_have_finalizers(kube: Kube, namespace: str) -> bool:
    return all(await _finalizers(kube, namespace))


async def _left_of(kube: Kube, operator: Operator) -> list[str]:
    """What of the release is still there."""
    listed = [await kube.list_all(kind, operator.namespace) for kind in _NAMESPACED]
    listed += [await kube.list_all(kind) for kind in _CLUSTER_WIDE]
    return [
        f"{obj['kind']} {obj['metadata']['name']}"
        for objects in listed
        for obj in objects
        if _is_of(operator, obj["metadata"])
    ]


def _is_of(operator: Operator, metadata: dict[str, Any]) -> bool:
    name: str = metadata["name"]
    chart: str = metadata.get("labels", {}).get("helm.sh/chart", "")
    secret = f"sh.helm.release.v1.{operator.release}."
    return name.startswith((operator.name, secret)) or chart.startswith("mooncake-")


async def _completes(cluster: ClusterUnderTest, kube: Kube, namespace: str) -> bool:
    async with (
        cluster.forward(kube, "quickstart-scheduler", namespace, 80) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        answer = await client.post("/v1/completions", json=_ASKED)
    return answer.status_code == 200 and bool(answer.json()["choices"])
