"""The shape of the Kubernetes objects that are rendered, and the labels and folders all of them share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mooncake_operator.planning.manifests.plan import Plan

Object: TypeAlias = dict[str, Any]

# Where volumes are mounted. Programs learn it from the environment only, so that another runtime may choose.
CONFIG_DIR = ("MOONCAKE_CONFIG_DIR", "/etc/mooncake")
RUN_DIR = ("MOONCAKE_RUN_DIR", "/run/mooncake")
JOURNAL_DIR = ("MOONCAKE_JOURNAL_DIR", "/var/lib/mooncake/journal")
REDIS_DIR = ("MOONCAKE_REDIS_DIR", "/etc/mooncake-redis")
ADMIN_DIR = ("MOONCAKE_ADMIN_DIR", "/etc/mooncake-admin")
API_KEYS_DIR = ("MOONCAKE_API_KEYS_DIR", "/etc/mooncake-api-keys")
SSD_DIR = "MOONCAKE_SSD_DIR"

POD_IP = "MOONCAKE_POD_IP"
REDIS_URL = "MOONCAKE_REDIS_URL"

CLUSTER_LABEL = "mooncake.io/cluster"
POOL_LABEL = "mooncake.io/pool"
REVISION_LABEL = "mooncake.io/revision"
RANK_LABEL = "mooncake.io/rank"
_STUCK_GRACE_S = 10

UNPRIVILEGED: Mapping[str, Any] = {
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
}
"""Of containers with the product's own image: what Pod Security's level `restricted` asks for, and no writing
but into volumes. Not for the whole Pod: an engine's own image may need root or IPC_LOCK."""


def reference(variable: str) -> str:
    """How arguments and later variables name an environment variable."""
    return f"$({variable})"


def labels(plan: Plan, component: str, **own: str) -> dict[str, str]:
    """Labels of one component's objects; `own` are keys below `mooncake.io/`."""
    common = {
        "app.kubernetes.io/name": "mooncake",
        "app.kubernetes.io/instance": plan.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": "mooncake-operator",
        "mooncake.io/cluster": plan.name,
    }
    return common | {f"mooncake.io/{key}": value for key, value in own.items()}


def an_object(
    plan: Plan, api_version: str, kind: str, name: str, own_labels: Mapping[str, str], **body: Any
) -> Object:
    """A namespaced object."""
    metadata = {"name": name, "namespace": plan.namespace, "labels": dict(own_labels)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def config_map(plan: Plan, name: str, component: str, data: Mapping[str, Any]) -> Object:
    """A ConfigMap whose keys are JSON documents."""
    texts = {key: json.dumps(document, indent=2, sort_keys=True) + "\n" for key, document in data.items()}
    return an_object(plan, "v1", "ConfigMap", name, labels(plan, component), data=texts)


def secret(plan: Plan, name: str, component: str, data: Mapping[str, str]) -> Object:
    """A Secret with plain text keys."""
    return an_object(
        plan, "v1", "Secret", name, labels(plan, component), type="Opaque", stringData=dict(data)
    )


def service(
    plan: Plan,
    name: str,
    component: str,
    selector: Mapping[str, str],
    ports: Sequence[tuple[str, int, int | str]],
    *,
    headless: bool = False,
) -> Object:
    """A Service; `ports` are (name, port, target). A headless one also names Pods that are not ready yet."""
    spec: Object = {
        "selector": dict(selector),
        "ports": [{"name": n, "port": port, "targetPort": target} for n, port, target in ports],
    }
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return an_object(plan, "v1", "Service", name, labels(plan, component), spec=spec)


def env(name: str, value: str) -> Object:
    """An environment variable."""
    return {"name": name, "value": value}


def pod_ip() -> Object:
    """The Pod's own address, as an environment variable."""
    return {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def mount(volume: str, folder: tuple[str, str], *, read_only: bool = True) -> Object:
    """A volume mounted at one of the folders above."""
    mounted: Object = {"name": volume, "mountPath": folder[1]}
    return mounted | {"readOnly": True} if read_only else mounted


def http_get(path: str, port: int | str, **timing: int) -> Object:
    """A probe."""
    return {"httpGet": {"path": path, "port": port}, **timing}


def liveness(path: str, port: int | str) -> Object:
    """A probe that ends a container which no longer answers, soon and not after the Pod's grace.

    That one is as long as a drain; who is stuck drains nothing, and meanwhile the kubelet would do nothing
    else for the Pod either.
    """
    timing = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
    return http_get(path, port, **timing, terminationGracePeriodSeconds=_STUCK_GRACE_S)


def digest(value: Any) -> str:
    """Short stable hash of a JSON value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def is_ready(pod: Object) -> bool:
    """Whether a Pod is ready, as its kubelet says."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
