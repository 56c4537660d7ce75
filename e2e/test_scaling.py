"""Who says how many: kubectl, a real HorizontalPodAutoscaler and the cluster's author, all at once."""

import json
from typing import Any

import pytest

from e2e.installation import Operator
from e2e.kube import Kube, condition, eventually
from e2e.played_kubelet import PlayedNodes
from e2e.small_cluster import NAME, SHAPE, manifest, removed_afterwards, working

POOL = f"{NAME}-decode"

pytestmark = pytest.mark.timeout(1200, func_only=True)


def autoscaler(least: int, most: int) -> dict[str, Any]:
    """Without any metrics it still keeps its bounds, which is writing enough."""
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "decode"},
        "spec": {
            "minReplicas": least,
            "maxReplicas": most,
            "scaleTargetRef": {
                "apiVersion": "mooncake.io/v1alpha1",
                "kind": "MooncakeDecodePool",
                "name": POOL,
            },
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}},
                }
            ],
        },
    }


async def replicas(kube: Kube, namespace: str) -> int:
    pool = await kube.get("MooncakeDecodePool", POOL, namespace)
    found: int = pool["spec"]["replicas"]
    return found


async def are(kube: Kube, namespace: str, number: int) -> None:
    """Wait until so many instances are asked for and run."""

    async def hold() -> bool:
        assert (await replicas(kube, namespace), len(await working(kube, namespace))) == (number, number)
        return True

    await eventually(f"{number} decode instances", hold, every_s=0.5)


async def test_kubectl_scale_an_autoscaler_and_the_clusters_author_do_not_fight(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    kubectl = operator.cluster.kubectl

    async def apply(decode: int) -> None:
        document = json.dumps(manifest(decode=decode))
        await kubectl("apply", "--namespace", namespace, "--filename", "-", stdin=document)

    async with PlayedNodes(kube, 2, shape=SHAPE), removed_afterwards(kube, namespace):
        await apply(2)
        await are(kube, namespace, 2)
        await kubectl("scale", "--namespace", namespace, f"mkdp/{POOL}", "--replicas=2")
        await apply(2)
        await kubectl("scale", "--namespace", namespace, f"mkdp/{POOL}", "--replicas=4")
        await are(kube, namespace, 4)
        await apply(2)
        await operator_has_seen(kube, namespace)
        await are(kube, namespace, 4)
        await kube.apply_all([autoscaler(5, 6)], namespace)
        await are(kube, namespace, 5)
        await apply(2)
        await operator_has_seen(kube, namespace)
        await are(kube, namespace, 5)
        await apply(3)

        async def is_taken_over() -> bool:
            pool = await kube.get("MooncakeDecodePool", POOL, namespace)
            return bool(pool["spec"]["declaredReplicas"] == 3)

        await eventually("the author's number is taken over", is_taken_over)
        # As long as there is an autoscaler, it has the last word.
        await are(kube, namespace, 5)
        scaler = await kube.get("HorizontalPodAutoscaler", "decode", namespace)
        able = condition(scaler, "AbleToScale")
        assert able is not None
        assert able["status"] == "True", able
        await kube.delete("HorizontalPodAutoscaler", "decode", namespace)
        await apply(1)
        await are(kube, namespace, 1)


async def operator_has_seen(kube: Kube, namespace: str) -> None:
    """Wait until the present spec has been acted on."""

    async def hold() -> bool:
        cluster = await kube.get("MooncakeCluster", NAME, namespace)
        ready = condition(cluster, "Ready")
        return ready is not None and ready["observedGeneration"] == cluster["metadata"]["generation"]

    await eventually("the operator has seen the newest spec", hold)
