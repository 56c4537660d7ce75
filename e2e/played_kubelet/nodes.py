"""Node objects and their heartbeats."""

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from e2e.kube import Kube, KubeError, eventually

_LEASES = "kube-node-lease"
LABEL = "mooncake.io/played"


@dataclass(frozen=True)
class NodeShape:
    """What a played node offers.

    Attributes:
        resources: capacity; extended resources (GPUs, RDMA devices, hugepages) are as good as any.
        labels: more labels.
        taint: keeps Pods away that do not tolerate ``mooncake.io/played``.
    """

    resources: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "128", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": "8"}
    )
    labels: Mapping[str, str] = field(default_factory=dict)
    taint: bool = False


async def register(kube: Kube, name: str, shape: NodeShape) -> None:
    """Make a Node that is Ready; one that is there is taken over."""
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", LABEL: "true", **shape.labels}
    spec: dict[str, Any] = {"taints": [{"key": LABEL, "effect": "NoSchedule"}]} if shape.taint else {}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": spec}
    await beat(kube, name)
    try:
        await kube.create(node)
    except KubeError as error:
        if error.reason != "AlreadyExists":
            raise
    await report_ready(kube, name, shape)


async def wait_until_usable(kube: Kube, names: Sequence[str]) -> None:
    """Wait until the control plane has seen that the nodes are Ready; it taints every new one."""

    async def are_usable() -> bool:
        tainted = {
            node["metadata"]["name"]
            for node in await kube.list_all("Node", labels=LABEL)
            for taint in node["spec"].get("taints", [])
            if taint["key"] == "node.kubernetes.io/not-ready"
        }
        return not tainted.intersection(names)

    await eventually("the played nodes are usable", are_usable)


async def report_ready(kube: Kube, name: str, shape: NodeShape) -> None:
    """Write the node's status."""
    now = stamp()
    resources = dict(shape.resources)
    conditions = [
        {
            "type": kind,
            "status": value,
            "reason": "PlayedKubelet",
            "message": "played",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        for kind, value in (
            ("Ready", "True"),
            ("MemoryPressure", "False"),
            ("DiskPressure", "False"),
            ("PIDPressure", "False"),
        )
    ]
    status = {
        "capacity": resources,
        "allocatable": resources,
        "conditions": conditions,
        "addresses": [{"type": "Hostname", "address": name}],
        "nodeInfo": _NODE_INFO,
    }
    await kube.patch("Node", name, {"status": status}, how="strategic", subresource="status")


async def beat(kube: Kube, name: str) -> None:
    """Renew the node's lease, as a kubelet does every few seconds."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": _LEASES},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
    }
    await kube.apply(lease, manager="played-kubelet")


async def keep_beating(kube: Kube, names: Sequence[str], every_s: float, silent: set[str]) -> None:
    """Renew all leases for ever, spread over the interval; nodes in ``silent`` are left out."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        for number, name in enumerate(names):
            await asyncio.sleep(max(0.0, begun + every_s * number / len(names) - loop.time()))
            if name not in silent:
                with suppress(KubeError, aiohttp.ClientError, TimeoutError):  # the next beat comes soon
                    await beat(kube, name)
        begun = max(begun + every_s, loop.time())


async def remove(kube: Kube, names: Sequence[str]) -> None:
    """Delete nodes, their leases, and what is bound to them.

    No node is deleted while the scheduler may still choose it: a Pod bound to a node that is gone keeps its
    namespace until the garbage collector of Pods, after 40 s, finds it.
    """
    await asyncio.gather(*(kube.patch("Node", name, {"spec": {"unschedulable": True}}) for name in names))
    await _remove_pods(kube, set(names))
    for name in names:
        await kube.delete("Node", name)
        await kube.delete("Lease", name, _LEASES)
    await _remove_pods(kube, set(names))


async def _remove_pods(kube: Kube, names: set[str]) -> None:
    for pod in await kube.list_all("Pod"):
        if pod["spec"].get("nodeName") in names:
            metadata = pod["metadata"]
            await kube.delete("Pod", metadata["name"], metadata["namespace"], grace_s=0, uid=metadata["uid"])


def stamp() -> str:
    """Now, in RFC 3339 with whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_NODE_INFO = {
    "machineID": "",
    "systemUUID": "",
    "bootID": "",
    "kernelVersion": "played",
    "osImage": "played",
    "containerRuntimeVersion": "played://1",
    "kubeletVersion": "v1.36.3",
    "kubeProxyVersion": "",
    "operatingSystem": "linux",
    "architecture": "amd64",
}
