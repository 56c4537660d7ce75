"""The sidecar beside each engine, where schedulers share their state."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_core.config import ListenConfig, SidecarConfig
from mooncake_core.registry import Role
from mooncake_operator.planning.manifests.capacity import kv_capacity_tokens
from mooncake_operator.planning.manifests.objects import (
    JOURNAL_DIR,
    POD_IP,
    RUN_DIR,
    UNPRIVILEGED,
    Object,
    env,
    http_get,
    liveness,
    mount,
    pod_ip,
    reference,
)
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.sharing import redis_access, shared_namespace
from mooncake_operator.planning.manifests.transfer import master_address, master_url
from mooncake_operator.planning.names import Port

CONFIG_VARIABLE = "MOONCAKE_SIDECAR_CONFIG"
# Abstract sockets (`@`), which have no owner: a socket's file may be written to by its user alone, and an
# engine's image runs as root where nobody says otherwise, the sidecar never. The folder is but a name that no
# other Pod of this network has.
EVENTS_ENDPOINT = f"ipc://@{reference(RUN_DIR[0])}/kv-events.sock"
REPLAY_ENDPOINT = f"ipc://@{reference(RUN_DIR[0])}/kv-replay.sock"
EVENTS_TOPIC = "kv-events"
REQUESTS: Mapping[str, Mapping[str, str]] = {"sidecar": {"cpu": "50m", "memory": "128Mi"}}
"""Beside a busy engine it would starve, its heartbeats come late and its instance be dropped."""
STORE_CLIENT = "mooncake_simulator.store.client"
"""The real one, `mooncake.store`, comes with SSDs of real stores."""


def sidecar_container(plan: Plan, pool: EnginePoolPlan, pod: str, pairing: str) -> Object:
    """The container; its configuration is an environment variable because it differs from Pod to Pod."""
    access = redis_access(plan)
    if access is None:
        raise ValueError(f"cluster {plan.name} shares no Redis: a sidecar has nowhere to write to")
    port = plan.names.port(pod, Port.SIDECAR)
    config = sidecar_config(plan, pool, pod, pairing)
    return {
        "name": "sidecar",
        "image": plan.images.mooncake,
        **UNPRIVILEGED,
        "command": ["python", "-m", "mooncake_sidecar.engine"],
        "env": [
            pod_ip(),
            env(*RUN_DIR),
            env(*JOURNAL_DIR),
            *access.env,
            # Last: it refers to those above.
            env(CONFIG_VARIABLE, config.model_dump_json(exclude_none=True)),
        ],
        "ports": [{"name": "sidecar", "containerPort": port}],
        "startupProbe": http_get(
            "/healthz", "sidecar", periodSeconds=1, timeoutSeconds=5, failureThreshold=300
        ),
        "livenessProbe": liveness("/healthz", "sidecar"),
        "readinessProbe": http_get("/readyz", "sidecar", periodSeconds=2, timeoutSeconds=5),
        "volumeMounts": [
            mount("run", RUN_DIR, read_only=False),
            mount("journal", JOURNAL_DIR, read_only=False),
            *access.mounts,
        ],
    }


def drain_config(plan: Plan, pool: EnginePoolPlan, pod: str, pairing: str) -> SidecarConfig:
    """What the drain command needs in the engine's container: the sidecar's address and the deadline.

    Without the folders and Secrets, which are mounted in the sidecar's container only.
    """
    beside = {"journal_dir": "", "redis_url": "", "redis_password_file": None}
    return sidecar_config(plan, pool, pod, pairing).model_copy(update=beside)


def sidecar_config(plan: Plan, pool: EnginePoolPlan, pod: str, pairing: str) -> SidecarConfig:
    """What the sidecar of one Pod is told."""
    access = redis_access(plan)
    if access is None:
        raise ValueError(f"cluster {plan.name} shares no Redis: a sidecar has nowhere to write to")
    engine = plan.cluster.spec.engine
    engine_port = plan.names.port(pod, Port.ENGINE)
    sidecar_port = plan.names.port(pod, Port.SIDECAR)
    own = f"http://{reference(POD_IP)}"
    bootstraps = engine.connector == "MooncakeConnector" and pool.role is Role.PREFILL
    return SidecarConfig(
        instance=pod,
        cluster=plan.name,
        namespace=shared_namespace(plan),
        pool=pool.name,
        role=pool.role,
        model=plan.cluster.spec.model.name,
        revision=pairing,
        engine=plan.engine_kind,
        connector=engine.connector,
        engine_url=f"http://127.0.0.1:{engine_port}",
        advertised_url=f"{own}:{engine_port}",
        bootstrap_url=f"{own}:{plan.names.port(pod, Port.BOOTSTRAP)}" if bootstraps else "",
        advertised_admin_url=f"{own}:{sidecar_port}",
        listen=ListenConfig(host=plan.names.listen_host, port=sidecar_port),
        redis_url=access.url,
        redis_password_file=access.password_file,
        journal_dir=reference(JOURNAL_DIR[0]),
        events_endpoint=EVENTS_ENDPOINT,
        replay_endpoint=REPLAY_ENDPOINT,
        fetch="store" if plan.store else "none",
        store=plan.store.name if plan.store else "",
        store_url=master_url(plan) if plan.store else "",
        store_client=STORE_CLIENT if plan.store and plan.simulated else "",
        store_address=master_address(plan) if plan.store and plan.simulated else "",
        pipeline_stages=pool.spec.instance.parallelism.pipeline,
        block_size_tokens=engine.block_size,
        kv_capacity_tokens=kv_capacity_tokens(engine, pool.spec.instance),
        max_batch=engine.max_batch,
        time_scale=engine.time_scale,
        drain_timeout_s=pool.spec.drain.timeout_seconds,
    )
