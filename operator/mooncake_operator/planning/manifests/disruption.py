"""PodDisruptionBudgets that count instances: what `kubectl drain` may take at once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from mooncake_operator.planning.manifests.objects import Object, an_object, is_ready, labels
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.store import NODE_ROLE


def disruption_budgets(plan: Plan) -> list[Object]:
    """One for each pool of more than one instance: with a single one, a budget could only block drains.

    One for the schedulers too: a node's drain would end all of them at once, and with them the endpoint.
    """
    budgets = [_engines(plan, pool) for pool in plan.engine_pools if pool.spec.replicas > 1]
    if plan.cluster.spec.scheduler.replicas > 1:
        budgets.append(_schedulers(plan))
    if plan.store is not None and plan.store.spec.replicas > 1:
        budgets.append(_budget(plan, plan.store.name, NODE_ROLE, plan.store.spec.replicas - 1))
    return budgets


def with_something_to_protect(
    budgets: Iterable[Object], pods: Sequence[Object], there: Container[str]
) -> list[Object]:
    """Budgets that are there, and those that select a Ready Pod: only such a one is asked for at an eviction.

    Before that a budget has no use, and its controller writes it anew for each Pod that is made.

    Args:
        budgets: the wanted ones.
        pods: the cluster's, as they are.
        there: names of those that exist.
    """
    ready = [pod for pod in pods if is_ready(pod)]
    return [
        budget
        for budget in budgets
        if budget["metadata"]["name"] in there or any(_selects(budget, pod) for pod in ready)
    ]


def _selects(budget: Object, pod: Object) -> bool:
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    return bool(wanted <= (pod["metadata"].get("labels") or {}).items())


def pods_to_keep(sizes: Sequence[int], least: int) -> int:
    """Pods that must stay so that `least` instances do.

    Each eviction may hit another instance, and an instance without one of its Pods is none: so many Pods may
    go as instances may, whatever their sizes. A bound of `least` times the size would let two evictions
    break two instances of two Pods where only one may be missing (pdb-operator issue 81). And where there are
    instances of two sizes, or one more than is wanted, what they have together is what counts.

    Args:
        sizes: Pods of each instance.
        least: instances.
    """
    return sum(sizes) - max(len(sizes) - least, 0)


def _engines(plan: Plan, pool: EnginePoolPlan) -> Object:
    wanted, floor = pool.spec.replicas, pool.spec.disruption.min_available
    least = wanted - 1 if floor is None else min(floor, wanted)
    return _budget(plan, pool.name, pool.role.value, pods_to_keep(_sizes(plan, pool), least))


def _sizes(plan: Plan, pool: EnginePoolPlan) -> list[int]:
    """Pods of each instance that is there, and of those that are still to be made."""
    wanted = [pool.spec.instance.size] * pool.spec.replicas
    there = [present.size for present in (plan.present or {}).get(pool.name, ())]
    if not any(size > 1 for size in (*wanted, *there)):
        return wanted  # where each Pod is an instance, a number more or less changes nothing
    return [*there, *wanted[len(there) :]]


def _schedulers(plan: Plan) -> Object:
    selector = {"mooncake.io/cluster": plan.name, "mooncake.io/role": "scheduler"}
    keep = plan.cluster.spec.scheduler.replicas - 1
    return _object(plan, plan.scheduler_name, labels(plan, "scheduler"), selector, keep)


def _budget(plan: Plan, pool: str, role: str, keep: int) -> Object:
    selector = {"mooncake.io/cluster": plan.name, "mooncake.io/pool": pool, "mooncake.io/role": role}
    return _object(plan, pool, labels(plan, "pool", pool=pool), selector, keep)


def _object(plan: Plan, name: str, own: Mapping[str, str], selector: Mapping[str, str], keep: int) -> Object:
    spec = {
        "minAvailable": keep,
        "selector": {"matchLabels": dict(selector)},
        # A Pod that does not work must not hold up the drain of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return an_object(plan, "policy/v1", "PodDisruptionBudget", name, own, spec=spec)
