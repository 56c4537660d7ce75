"""A MooncakeCluster that costs a test little: its engines are played, its scheduler is real."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from e2e.kube import Kube, Object, eventually
from e2e.played_kubelet import NodeShape

NAME = "small"
SHAPE = NodeShape(taint=True)
_PLAYED = {
    "nodeSelector": {"mooncake.io/played": "true"},
    "tolerations": [{"key": "mooncake.io/played", "operator": "Exists"}],
}


def manifest(*, prefill: int = 1, decode: int = 2, drain_s: int = 5, played: bool = True) -> Object:
    """The cluster, as a user would write it.

    Args:
        prefill: instances.
        decode: instances.
        drain_s: how long each may take to become empty.
        played: whether engines go to played nodes.
    """
    pool: dict[str, Any] = {"drain": {"timeoutSeconds": drain_s}}
    if played:
        pool["podTemplate"] = {"spec": _PLAYED}
    return {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"name": "llama3-70b"},
            "engine": {"type": "Simulated", "simulated": {"timeScale": 10}},
            "prefillPools": [{"name": "prefill", "replicas": prefill, **pool}],
            "decodePools": [{"name": "decode", "replicas": decode, **pool}],
        },
    }


async def engines(kube: Kube, namespace: str, role: str = "decode") -> dict[str, Object]:
    """Pods of a role by name, those that end included."""
    found = await kube.list_all("Pod", namespace, labels=f"mooncake.io/role={role}")
    return {pod["metadata"]["name"]: pod for pod in found}


async def working(kube: Kube, namespace: str, role: str = "decode") -> list[str]:
    """Pods of a role whose containers are ready and which do not end."""
    return sorted(
        name
        for name, pod in (await engines(kube, namespace, role)).items()
        if "deletionTimestamp" not in pod["metadata"]
        and any(
            c["type"] == "ContainersReady" and c["status"] == "True"
            for c in pod.get("status", {}).get("conditions", ())
        )
    )


@asynccontextmanager
async def removed_afterwards(kube: Kube, namespace: str) -> AsyncIterator[None]:
    """Take the cluster away before its namespace goes.

    The namespace controller, having found Pods, looks again after half of their longest grace period only,
    and a scheduler's is long.
    """
    try:
        yield
    finally:
        await kube.delete("MooncakeCluster", NAME, namespace)

        async def are_gone() -> bool:
            return not await engines(kube, namespace, "scheduler")

        await eventually("the scheduler is gone", are_gone)
