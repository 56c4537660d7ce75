"""Services: the cluster's endpoint, names for the Pods of pools, and the store's master."""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_operator.planning.manifests.objects import (
    CLUSTER_LABEL,
    POOL_LABEL,
    RANK_LABEL,
    Object,
    service,
)
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.names import Port

HTTP_PORT = 80


def services(plan: Plan) -> list[Object]:
    """All Services of a cluster but Redis' own."""
    found = [_endpoint(plan)]
    # Workers serve nothing and nobody looks for them: they look for their leader.
    found += [
        _pool(plan, pool.name, pool.pods()[0], **{RANK_LABEL: "0"})
        for pool in plan.engine_pools
        if _is_looked_up(plan, pool)
    ]
    if plan.store is not None:
        found += [_pool(plan, plan.store.name, plan.store.nodes()[0]), _master(plan)]
    return found


def _is_looked_up(plan: Plan, pool: EnginePoolPlan) -> bool:
    """Whether Pods of a pool are found by name: by the others of their instance, or by static schedulers.

    Else each sidecar registers its Pod's address, and endpoints that nobody reads would be written anew for
    each Pod that comes, becomes ready or goes.
    """
    there = (plan.present or {}).get(pool.name, ())
    sizes = (pool.spec.instance.size, *(present.size for present in there))
    return not plan.shares_state or any(size > 1 for size in sizes)


def still_looked_up(services: Iterable[Object], pods: Iterable[Object]) -> list[Object]:
    """Services of pools that have a Pod which finds another by name, or is found so, whatever is wanted now.

    A worker looks for its leader until it has ended, and schedulers without Redis go on with the addresses
    that they know until there are instances that register.

    Args:
        services: those that are there.
        pods: the cluster's, those that end too.
    """
    pools = {(pod["metadata"].get("labels") or {}).get(POOL_LABEL) for pod in pods if _needs_names(pod)}
    return [one for one in services if one["metadata"]["name"] in pools]


def _needs_names(pod: Object) -> bool:
    rank = (pod["metadata"].get("labels") or {}).get(RANK_LABEL)
    containers = (pod.get("spec") or {}).get("containers") or ()
    return rank is not None and (rank != "0" or all(each["name"] != "sidecar" for each in containers))


def _endpoint(plan: Plan) -> Object:
    selector = {"mooncake.io/cluster": plan.name, "mooncake.io/role": "scheduler"}
    admin = plan.names.port(plan.scheduler_pods()[0], Port.ADMIN)
    ports: list[tuple[str, int, int | str]] = [("http", HTTP_PORT, "serving"), ("admin", admin, "admin")]
    return service(plan, plan.scheduler_name, "scheduler", selector, ports)


def _pool(plan: Plan, name: str, first_pod: str, **more: str) -> Object:
    selector = {CLUSTER_LABEL: plan.name, POOL_LABEL: name, **more}
    port = plan.names.port(first_pod, Port.ENGINE)
    return service(plan, name, "pool", selector, [("http", port, "http")], headless=True)


def _master(plan: Plan) -> Object:
    if plan.store is None:
        raise ValueError(f"cluster {plan.name} has no KV cache pool")
    selector = {
        "mooncake.io/cluster": plan.name,
        "mooncake.io/pool": plan.store.name,
        "mooncake.io/role": "store-master",
    }
    (first, *_) = plan.store.masters()
    ports: list[tuple[str, int, int | str]] = [
        ("rpc", plan.names.port(first, Port.MASTER_RPC), "rpc"),
        ("http", plan.names.port(first, Port.MASTER_HTTP), "http"),
    ]
    return service(plan, plan.store.master_service, "store-master", selector, ports)
