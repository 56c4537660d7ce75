"""Pods of a KV cache pool: a master that knows where objects lie, and nodes that hold them.

Flags of the real programs: mooncake_master and mooncake_client of Mooncake 0.3.13.
"""

from __future__ import annotations

from mooncake_core.api.scalars import quantity_bytes
from mooncake_core.profiles import PROFILES
from mooncake_operator.planning.manifests.inputs import store_revisions
from mooncake_operator.planning.manifests.objects import (
    CLUSTER_LABEL,
    POD_IP,
    POOL_LABEL,
    SSD_DIR,
    UNPRIVILEGED,
    Object,
    env,
    http_get,
    labels,
    liveness,
    mount,
    pod_ip,
    reference,
)
from mooncake_operator.planning.manifests.plan import Plan, StorePlan
from mooncake_operator.planning.manifests.pods import (
    a_pod,
    container_resources,
    spread,
    with_revision,
)
from mooncake_operator.planning.manifests.transfer import master_address
from mooncake_operator.planning.names import Port

NODE_ROLE = "store-node"
_PROMOTED_A_HEARTBEAT = 512
"""Blocks that a node brings from its SSD between two heartbeats: what 3 GB/s are in blocks of 5 MB and
seconds. With Mooncake's default of 1 a conversation would take half an hour."""


def store_pods(plan: Plan, store: StorePlan) -> list[Object]:
    """Master first: nodes that start before it try again until it is there."""
    master_revision, node_revision = store_revisions(plan, store)
    masters = [with_revision(master_pod(plan, store, pod), master_revision) for pod in store.masters()]
    return masters + [with_revision(node_pod(plan, store, pod), node_revision) for pod in store.nodes()]


def store_capacity_tokens(plan: Plan, store: StorePlan) -> int:
    """Tokens of KV that the store holds in DRAM; 0 = unknown, as with real engines."""
    profile = plan.cluster.spec.engine.profile
    if profile is None:
        return 0
    held_bytes = store.spec.replicas * quantity_bytes(store.spec.segment_size)
    return held_bytes // PROFILES[profile].kv_bytes_per_token


def _image(plan: Plan, store: StorePlan) -> str:
    if plan.simulated:
        return store.spec.image or plan.images.mooncake
    return store.spec.image or plan.cluster.spec.engine.image or plan.images.mooncake


def master_pod(plan: Plan, store: StorePlan, pod: str) -> Object:
    """A Pod that knows where objects lie."""
    rpc, http = plan.names.port(pod, Port.MASTER_RPC), plan.names.port(pod, Port.MASTER_HTTP)
    eviction = store.spec.master.eviction
    tuning = {
        "eviction-high-watermark-ratio": eviction.high_watermark,
        "eviction-ratio": eviction.ratio,
        "default-kv-lease-ttl": str(store.spec.master.kv_lease_seconds * 1000),
    }
    host = plan.names.listen_host
    if plan.simulated:
        command = ["python", "-m", "mooncake_simulator.store", "master"]
        flags = {
            "host": host,
            "rpc-port": str(rpc),
            "metrics-port": str(http),
            **tuning,
            # Sidecars look up what is to come back from SSD (ADR 39); nobody else looks anything up twice.
            "promotion-on-hit": "true",
            "promotion-max-per-heartbeat": str(_PROMOTED_A_HEARTBEAT),
        }
        arguments = [word for name, value in flags.items() for word in (f"--{name}", value)]
    else:
        command = ["mooncake_master"]
        flags = {
            "rpc-address": host,
            "rpc-port": str(rpc),
            "metrics-host": host,
            "metrics-port": str(http),
            **tuning,
            "logtostderr": "true",
        }
        arguments = [f"--{name.replace('-', '_')}={value}" for name, value in flags.items()]
    container: Object = {
        "name": "master",
        "image": _image(plan, store),
        **(UNPRIVILEGED if plan.simulated else {}),
        "command": command,
        "args": arguments,
        "env": [pod_ip()],
        "ports": [{"name": "rpc", "containerPort": rpc}, {"name": "http", "containerPort": http}],
        **_probes(),
    }
    own = labels(plan, "store-master", pool=store.name, role="store-master", instance=pod)
    return a_pod(plan, pod, own, [container], [], subdomain=store.name)


def node_pod(plan: Plan, store: StorePlan, pod: str) -> Object:
    """A Pod that holds a segment."""
    rpc, http = plan.names.port(pod, Port.NODE_RPC), plan.names.port(pod, Port.NODE_HTTP)
    ssd = store.spec.ssd
    ssd_folder = (SSD_DIR, ssd.path) if ssd else None
    container: Object = {
        "name": "node",
        "image": _image(plan, store),
        **(UNPRIVILEGED if plan.simulated else {}),
        **_node_command(plan, store, rpc, http),
        "env": [pod_ip(), *([env(*ssd_folder)] if ssd_folder else [])],
        "ports": [{"name": "rpc", "containerPort": rpc}, {"name": "http", "containerPort": http}],
        **_probes(),
        **container_resources(store.spec.resources),
        "volumeMounts": [mount("ssd", ssd_folder, read_only=False)] if ssd_folder else [],
    }
    volumes = [{"name": "ssd", "emptyDir": {"sizeLimit": ssd.size}}] if ssd else []
    own = labels(plan, NODE_ROLE, pool=store.name, role=NODE_ROLE, instance=pod)
    return a_pod(
        plan,
        pod,
        own,
        [container],
        volumes,
        subdomain=store.name,
        placement=spread(store.spec.scheduling, own, CLUSTER_LABEL, POOL_LABEL),
        template=store.spec.pod_template,
    )


def _node_command(plan: Plan, store: StorePlan, rpc: int, http: int) -> Object:
    # Others reach a segment under the address given here, hence the Pod's own.
    host, segment_bytes = reference(POD_IP), quantity_bytes(store.spec.segment_size)
    if not plan.simulated:
        flags = {
            "host": host,
            "port": rpc,
            "global_segment_size": segment_bytes,
            "master_server_address": master_address(plan),
            "metadata_server": "P2PHANDSHAKE",
            "protocol": plan.cluster.spec.network.protocol.lower(),
            "enable_http_server": "true",
            "http_port": http,
        }
        return {
            "command": ["mooncake_client"],
            "args": [f"--{name}={value}" for name, value in flags.items()],
        }
    arguments = [
        *("--host", host),
        *("--port", str(rpc)),
        *("--http-port", str(http)),
        *("--global-segment-size", str(segment_bytes)),
        *("--master-server-address", master_address(plan)),
        *("--profile", plan.cluster.spec.engine.profile or ""),
        *("--time-scale", str(plan.cluster.spec.engine.time_scale)),
    ]
    if store.spec.ssd is not None:
        arguments += ["--ssd-size", str(quantity_bytes(store.spec.ssd.size))]
    return {"command": ["python", "-m", "mooncake_simulator.store", "node"], "args": arguments}


def _probes() -> Object:
    return {
        "startupProbe": http_get("/health", "http", periodSeconds=1, timeoutSeconds=5, failureThreshold=300),
        "readinessProbe": http_get("/health", "http", periodSeconds=5, timeoutSeconds=5),
        "livenessProbe": liveness("/health", "http"),
    }
