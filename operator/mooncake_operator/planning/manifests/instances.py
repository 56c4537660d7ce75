"""The registry's records of a cluster whose instances cannot announce themselves: no Redis, no sidecars."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_operator.planning.manifests.capacity import kv_capacity_tokens, max_model_len_tokens
from mooncake_operator.planning.manifests.inputs import pairing_revision
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan, Present
from mooncake_operator.planning.manifests.store import store_capacity_tokens
from mooncake_operator.planning.manifests.transfer import master_url
from mooncake_operator.planning.names import Port


def static_instances(plan: Plan) -> list[Instance]:
    """Every instance of the cluster, during a rollout old and new ones, and its store."""
    found = [_engine(plan, pool, there) for pool in plan.engine_pools for there in _present(plan, pool)]
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


def _present(plan: Plan, pool: EnginePoolPlan) -> Sequence[Present]:
    """Those that are there, as they were made, and those that are wanted and not there yet.

    The latter need not wait for their turn: a node takes up to a minute to notice a changed ConfigMap.
    """
    wanted = {name: Present(name, pairing_revision(plan)) for name in pool.instances()}
    there = {each.name: each for each in (plan.present or {}).get(pool.name, ())}
    return list((wanted | there).values())


def _engine(plan: Plan, pool: EnginePoolPlan, there: Present) -> Instance:
    pod = there.name
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
        revision=there.pairing,
        engine=plan.engine_kind,
        connector=engine.connector,
        bootstrap_url=f"http://{host}:{plan.names.port(pod, Port.BOOTSTRAP)}" if bootstraps else "",
        block_size_tokens=engine.block_size,
        kv_capacity_tokens=kv_capacity_tokens(engine, pool.spec.instance),
        max_model_len_tokens=max_model_len_tokens(engine),
        max_batch=engine.max_batch,
        fetch="store" if plan.store else "none",
        store=plan.store.name if plan.store else "",
        instance_class=pool.name,
        pipeline_stages=pool.spec.instance.parallelism.pipeline,
    )
