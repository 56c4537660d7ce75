"""Pods of prefill and decode instances: vLLM's command line, or the simulated engine's, which is the same.

An instance's leader serves and has the sidecar beside it: scheduling, KV events, hand-over and drain happen
in its process. Workers, where there are any, have the engine alone.
"""

from __future__ import annotations

import json
from typing import Any

from mooncake_core.profiles import PIPELINE_CHUNK_TOKENS
from mooncake_core.registry import Role
from mooncake_operator.planning.manifests.groups import (
    Member,
    group_arguments,
    group_environment,
    members,
    placement,
    worker_pre_stop,
)
from mooncake_operator.planning.manifests.inputs import pairing_revision, pool_revision
from mooncake_operator.planning.manifests.objects import (
    CONFIG_DIR,
    POD_IP,
    RUN_DIR,
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
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.pods import (
    a_pod,
    container_resources,
    model_files,
    shared_memory,
    with_revision,
)
from mooncake_operator.planning.manifests.sharing import redis_access
from mooncake_operator.planning.manifests.sidecar import (
    CONFIG_VARIABLE,
    EVENTS_ENDPOINT,
    EVENTS_TOPIC,
    REPLAY_ENDPOINT,
    REQUESTS,
    drain_config,
    sidecar_container,
)
from mooncake_operator.planning.manifests.transfer import STAGED_KV_S, must_hide_statistics, transfer_config
from mooncake_operator.planning.names import Port

HASH_SEED = "0"
STORE_CONFIG = "mooncake.json"
_MODULES = {"vLLM": "vllm.entrypoints.openai.api_server", "Simulated": "mooncake_simulator.engine"}
_VLLM_COMMAND_LINE = "vllm.entrypoints.cli.main"
_AFTER_DRAIN_S = 15
"""What streams get that a drain left over; also the wait for KV that nobody fetched."""
_BEYOND_DRAIN_S = 30


def engine_pods(plan: Plan, pool: EnginePoolPlan) -> list[Object]:
    """All Pods of a pool, labelled with the pool's revision."""
    revision = pool_revision(plan, pool)
    return [with_revision(engine_pod(plan, pool, member), revision) for member in members(pool)]


def engine_pod(plan: Plan, pool: EnginePoolPlan, member: Member) -> Object:
    """One Pod of a pool, whatever its revision is called."""
    if member.leads:
        containers = [_serving_container(plan, pool, member)]
        if plan.shares_state:
            containers.append(sidecar_container(plan, pool, member.pod, pairing_revision(plan)))
    else:
        containers = [_worker_container(plan, pool, member)]
    volumes, _ = _storage(plan, pool, member)
    own = labels(
        plan,
        pool.role.value,
        pool=pool.name,
        role=pool.role.value,
        instance=member.instance,
        rank=member.rank,
        pairing=pairing_revision(plan),
    )
    return a_pod(
        plan,
        member.pod,
        own,
        containers,
        volumes,
        subdomain=pool.name,
        grace_s=pool.spec.drain.timeout_seconds + _BEYOND_DRAIN_S,
        placement=placement(pool.spec.scheduling, own, member),
        template=pool.spec.pod_template,
        requests=REQUESTS,
    )


def _serving_container(plan: Plan, pool: EnginePoolPlan, member: Member) -> Object:
    """The engine of an instance's leader."""
    pod = member.pod
    ports = [
        ("http", Port.ENGINE),
        ("bootstrap", Port.BOOTSTRAP),
        ("side-channel", Port.SIDE_CHANNEL),
        *([("group", Port.GROUP)] if pool.spec.instance.size > 1 else []),
    ]
    container: Object = {
        **_container(plan, pool, member),
        "command": ["python", "-m", _MODULES[plan.cluster.spec.engine.type]],
        "args": engine_arguments(plan, pool, member),
        "ports": [{"name": name, "containerPort": plan.names.port(pod, port)} for name, port in ports],
        # Loading weights may take half an hour; a simulated engine is there at once.
        "startupProbe": http_get("/health", "http", periodSeconds=1, timeoutSeconds=5, failureThreshold=1800),
        "readinessProbe": http_get("/health", "http", periodSeconds=5, timeoutSeconds=5),
        "livenessProbe": liveness("/health", "http"),
    }
    if plan.shares_state:
        container["lifecycle"] = {"preStop": {"exec": {"command": _drain_command(plan, pool, pod)}}}
    return container


def _worker_container(plan: Plan, pool: EnginePoolPlan, member: Member) -> Object:
    """The engine of another Pod of an instance.

    It has no probes, for it answers nobody: the leader is healthy only with all of its workers, and ends when
    it has lost one.
    """
    if plan.simulated:
        command = ["python", "-m", _MODULES["Simulated"]]
    else:
        # The API server's module would open a second API server: only `vllm serve` knows headless workers.
        command = ["python", "-m", _VLLM_COMMAND_LINE, "serve"]
    return {
        **_container(plan, pool, member),
        "command": command,
        "args": worker_arguments(plan, pool, member),
        "ports": [],
        "lifecycle": {"preStop": {"exec": {"command": worker_pre_stop(plan, pool, member)}}},
    }


def _container(plan: Plan, pool: EnginePoolPlan, member: Member) -> Object:
    """What the engines of all Pods of an instance have in common."""
    _, mounts = _storage(plan, pool, member)
    return {
        "name": "engine",
        "image": plan.cluster.spec.engine.image or plan.images.mooncake,
        **(UNPRIVILEGED if plan.simulated else {}),
        "env": _environment(plan, pool, member),
        **container_resources(pool.spec.resources),
        "volumeMounts": mounts,
    }


def _drain_command(plan: Plan, pool: EnginePoolPlan, pod: str) -> list[str]:
    """Ask the sidecar to empty the instance, and wait until it is.

    In an engine's own image there is Python but not this product.
    """
    if plan.simulated:
        return ["python", "-m", "mooncake_sidecar.engine", "drain"]
    url = f"http://127.0.0.1:{plan.names.port(pod, Port.SIDECAR)}/drain"
    ask = f"urlopen(Request({url!r}, method='POST'), timeout={pool.spec.drain.timeout_seconds})"
    return ["python", "-c", f"from urllib.request import Request, urlopen; {ask}"]


def engine_arguments(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[str]:
    """Arguments of an engine's server; the user's come last, they contradict none (the API sees to it)."""
    spec = plan.cluster.spec
    # With a sidecar the drain comes before SIGTERM; without one SIGTERM is the drain.
    shutdown_s = _AFTER_DRAIN_S if plan.shares_state else pool.spec.drain.timeout_seconds
    arguments = [
        *("--model", _model(plan)),
        *("--served-model-name", spec.model.name),
        *("--host", plan.names.listen_host),
        *("--port", str(plan.names.port(member.pod, Port.ENGINE))),
        "--enable-prompt-tokens-details",
        *("--shutdown-timeout", str(shutdown_s)),
    ]
    if plan.shares_state:
        arguments += ["--kv-events-config", _json(_events_config())]
    if must_hide_statistics(plan):
        arguments.append("--disable-log-stats")
    return [*arguments, *_common_arguments(plan, pool, member), *spec.engine.args]


def worker_arguments(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[str]:
    """Arguments of a worker: what concerns computing and handing over, nothing of serving."""
    # `vllm serve` takes the model by its place and refuses `--model`.
    model = ["--model", _model(plan)] if plan.simulated else [_model(plan)]
    return [*model, "--headless", *_common_arguments(plan, pool, member), *plan.cluster.spec.engine.args]


def _model(plan: Plan) -> str:
    return plan.cluster.spec.model.path or plan.cluster.spec.model.name


def _common_arguments(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[str]:
    """What all processes of one instance must be told alike."""
    engine, parallelism = plan.cluster.spec.engine, pool.spec.instance.parallelism
    arguments = ["--block-size", str(engine.block_size)]
    if parallelism.tensor > 1:
        arguments += ["--tensor-parallel-size", str(parallelism.tensor)]
    if parallelism.pipeline > 1:
        arguments += ["--pipeline-parallel-size", str(parallelism.pipeline)]
        if pool.role is Role.PREFILL:
            arguments += ["--max-num-batched-tokens", str(PIPELINE_CHUNK_TOKENS)]
    arguments += group_arguments(plan, pool, member)
    arguments += ["--kv-transfer-config", _json(transfer_config(plan, pool.role))]
    if engine.profile is not None:
        arguments += ["--profile", engine.profile, "--time-scale", str(engine.time_scale)]
    return arguments


def _events_config() -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": EVENTS_ENDPOINT,
        "replay_endpoint": REPLAY_ENDPOINT,
        "topic": EVENTS_TOPIC,
    }


def _environment(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[Object]:
    # All ranks register with the bootstrap server of rank 0, hence its port.
    bootstrap_port = plan.names.port(member.instance, Port.BOOTSTRAP)
    variables = [
        pod_ip(),
        env("VLLM_HOST_IP", reference(POD_IP)),
        # One seed for all: block hashes, and with them the store's keys, must agree (vLLM below 0.30).
        env("PYTHONHASHSEED", HASH_SEED),
        # Whole hashes: by them the store's master is asked about a block, which shortened ones do not name.
        env("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0"),
        env("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(bootstrap_port)),
        env("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", str(STAGED_KV_S)),
        env("VLLM_NIXL_SIDE_CHANNEL_HOST", reference(POD_IP)),
        env("VLLM_NIXL_SIDE_CHANNEL_PORT", str(plan.names.port(member.pod, Port.SIDE_CHANNEL))),
        *group_environment(plan, pool, member),
    ]
    if plan.cluster.spec.network.protocol == "TCP":
        variables.append(env("MC_FORCE_TCP", "1"))
    if plan.store is not None:
        variables += [
            env(*CONFIG_DIR),
            env("MOONCAKE_CONFIG_PATH", f"{reference(CONFIG_DIR[0])}/{STORE_CONFIG}"),
        ]
    if plan.shares_state and member.leads:
        variables.append(env(*RUN_DIR))
        if plan.simulated:
            config = drain_config(plan, pool, member.pod, pairing_revision(plan))
            variables.append(env(CONFIG_VARIABLE, config.model_dump_json(exclude_none=True)))
    return variables


def _storage(plan: Plan, pool: EnginePoolPlan, member: Member) -> tuple[list[Object], list[Object]]:
    """Volumes of the Pod, and mounts of the engine's container."""
    volumes, mounts = model_files(plan.cluster.spec.model)
    shm_volumes, shm_mounts = shared_memory(pool.spec.resources)
    volumes, mounts = [*volumes, *shm_volumes], [*mounts, *shm_mounts]
    if plan.store is not None:
        volumes.append({"name": "config", "configMap": {"name": f"{plan.name}-engine"}})
        mounts.append(mount("config", CONFIG_DIR))
    if member.leads and (access := redis_access(plan)):
        volumes += [{"name": "run", "emptyDir": {}}, {"name": "journal", "emptyDir": {}}, *access.volumes]
        mounts.append(mount("run", RUN_DIR, read_only=False))
    return volumes, mounts


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
