"""The two workloads: the same Pods, wished for as MooncakeClusters and as Deployments."""

from __future__ import annotations

from typing import Any

from mooncake_core.api import MooncakeCluster
from mooncake_operator.planning import ClusterNames, render

Object = dict[str, Any]
SURGE = 5
"""A quarter of 20, which is what a Deployment does when nobody says anything."""


def cluster(number: int, instances: int, namespace: str, *, time_scale: int = 10) -> Object:
    """One MooncakeCluster of a prefill and a decode pool."""
    pool: Object = {
        "name": "",
        "replicas": instances,
        "update": {"maxSurge": SURGE, "maxUnavailable": SURGE},
    }
    return {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": f"c{number}", "namespace": namespace},
        "spec": {
            "model": {"name": "llama3-70b"},
            "engine": {
                "type": "Simulated",
                "connector": "MooncakeConnector",
                "simulated": {"profile": "llama3-70b-8xa800", "timeScale": time_scale},
            },
            "slo": {"ttft": {"target": "30s"}, "tbt": {"target": "100ms"}},
            "prefillPools": [{**pool, "name": "prefill"}],
            "decodePools": [{**pool, "name": "decode"}],
            "scheduler": {"replicas": 1, "redis": {"secretRef": {"name": "redis"}}},
        },
    }


def secret(namespace: str) -> Object:
    """Where the clusters' Redis is; nobody connects, for no container runs."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "redis", "namespace": namespace},
        "stringData": {"url": "redis://10.0.0.1:6379/0", "password": "none"},
    }


def deployments(
    number: int, instances: int, namespace: str, *, time_scale: int = 10, gate: str = ""
) -> list[Object]:
    """Two Deployments in place of a cluster, with the very Pods that the operator makes.

    Args:
        number: of the cluster.
        instances: of each Deployment.
        namespace: where.
        time_scale: the field that is changed later.
        gate: a readiness gate of the Pods; empty = they have none.
    """
    spec = cluster(number, 1, namespace, time_scale=time_scale)
    pods = render(MooncakeCluster.model_validate(spec), ClusterNames()).pods
    return [
        _deployment(f"c{number}-{pod['metadata']['labels']['mooncake.io/role']}", instances, pod, gate)
        for pod in pods
    ]


def budgets(number: int, instances: int, namespace: str) -> list[Object]:
    """What a controller of Kubernetes keeps up to date for each pool of a cluster, for two Deployments."""
    found: list[Object] = []
    for role in ("prefill", "decode"):
        name = f"c{number}-{role}"
        spec = {"minAvailable": instances - 1, "selector": {"matchLabels": {"app": name}}}
        metadata = {"name": name, "namespace": namespace}
        found.append(
            {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}
        )
    return found


def _deployment(name: str, replicas: int, pod: Object, gate: str) -> Object:
    labels = {**pod["metadata"]["labels"], "app": name}
    # The operator would take them for strangers of its clusters, which is another test.
    labels = {key: value for key, value in labels.items() if not key.startswith("mooncake.io/")}
    labels["app.kubernetes.io/managed-by"] = "benchmark"
    spec = {key: value for key, value in pod["spec"].items() if key not in ("readinessGates", "hostname")}
    spec["restartPolicy"] = "Always"
    if gate:
        spec["readinessGates"] = [{"conditionType": gate}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": pod["metadata"]["namespace"]},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "strategy": {"rollingUpdate": {"maxSurge": SURGE, "maxUnavailable": SURGE}},
            "template": {
                "metadata": {"labels": labels, "annotations": pod["metadata"].get("annotations", {})},
                "spec": spec,
            },
        },
    }
