"""The registry's records of a cluster whose instances cannot announce themselves: no Redis, no sidecars."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from mooncake_core.api.engine import EngineSpec
from mooncake_core.profiles import PROFILES
from mooncake_core.registry import EngineKind, Instance, Role

from mooncake_operator.planning.manifests.engine import pairing_revision
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.store import store_capacity_tokens
from mooncake_operator.planning.manifests.transfer import master_url
from mooncake_operator.planning.names import Port

_SIMULATED_MAX_BATCH = 256
"""vLLM's `--max-num-seqs` where it is not given, which the simulated engine keeps."""


def static_instances(plan: Plan) -> list[Instance]:
    """Every instance of the cluster, and its store."""
    found = [_engine(plan, pool, pod) for pool in plan.engine_pools for pod in pool.pods()]
    if plan.store is not None:
        store = Instance(
            id=plan.store.name,
            role=Role.STORE,
            url=master_url(plan),
            cluster=plan.name,
            pool=plan.store.name,
            model=plan.cluster.spec.model.name,
            engine=EngineKind.STORE,
            block_size_tokens=plan.cluster.spec.engine.block_size,
            kv_capacity_tokens=store_capacity_tokens(plan, plan.store),
        )
        found.append(store)
    return found


def as_documents(instances: Sequence[Instance]) -> list[object]:
    """The records as JSON values."""
    built: list[object] = msgspec.to_builtins(list(instances))
    return built


def _engine(plan: Plan, pool: EnginePoolPlan, pod: str) -> Instance:
    engine = plan.cluster.spec.engine
    host = plan.names.pod_host(pod, pool.name, plan.namespace)
    bootstraps = engine.connector == "MooncakeConnector" and pool.role is Role.PREFILL
    return Instance(
        id=pod,
        role=pool.role,
        url=f"http://{host}:{plan.names.port(pod, Port.ENGINE)}",
        cluster=plan.name,
        pool=pool.name,
        model=plan.cluster.spec.model.name,
        revision=pairing_revision(plan),
        engine=plan.engine_kind,
        connector=engine.connector,
        bootstrap_url=f"http://{host}:{plan.names.port(pod, Port.BOOTSTRAP)}" if bootstraps else "",
        block_size_tokens=engine.block_size,
        kv_capacity_tokens=kv_capacity_tokens(engine),
        max_model_len_tokens=_number(engine.args, "--max-model-len") or 0,
        max_batch=max_batch(engine),
        fetch="store" if plan.store else "none",
        store=plan.store.name if plan.store else "",
        instance_class=pool.name,
        pipeline_stages=pool.spec.instance.parallelism.pipeline,
    )


def kv_capacity_tokens(engine: EngineSpec) -> int:
    """KV tokens that an engine holds in HBM, by arguments or profile; 0 = only the engine knows."""
    if blocks := _number(engine.args, "--num-gpu-blocks-override"):
        # One block is vLLM's null block, which holds nothing.
        return max(blocks - 1, 0) * engine.block_size
    if engine.profile is None:
        return 0
    return PROFILES[engine.profile].kv_capacity_tokens // engine.block_size * engine.block_size


def max_batch(engine: EngineSpec) -> int:
    """Most requests in one batch; 0 = only the engine knows."""
    given = _number(engine.args, "--max-num-seqs")
    if given is not None:
        return given
    return _SIMULATED_MAX_BATCH if engine.type == "Simulated" else 0


def _number(arguments: Sequence[str], flag: str) -> int | None:
    """Value of a flag written as `--flag=5` or `--flag 5`; None when it is absent or not a plain number."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = text if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return int(value) if value is not None and re.fullmatch(r"[0-9]+", value) else None
