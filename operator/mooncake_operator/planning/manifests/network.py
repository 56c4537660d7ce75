"""NetworkPolicies: who may speak to the Pods of a cluster. Only what comes in is bounded.

KV events carry tokens, engines hand their memory to whoever asks, and Redis holds the ledger: none of it is
for other Pods of the network.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_operator.planning.manifests.objects import Object, an_object, labels
from mooncake_operator.planning.manifests.plan import Plan

OPERATOR = {"app.kubernetes.io/name": "mooncake", "app.kubernetes.io/component": "operator"}
METRICS_READER = {"app.kubernetes.io/name": "prometheus"}
_ENGINE_ROLES = ("prefill", "decode")
_STORE_ROLES = ("store-master", "store-node")
_EVERYWHERE: Object = {}


def network_policies(plan: Plan) -> list[Object]:
    """One for each kind of Pod."""
    policies = [_schedulers(plan), _engines(plan)]
    if plan.store is not None:
        policies.append(_store(plan))
    if plan.manages_redis:
        policies.append(_redis(plan))
    return policies


def _schedulers(plan: Plan) -> Object:
    ingress = [
        {"ports": [{"port": "serving"}]},
        {"from": [_anywhere(OPERATOR), _anywhere(METRICS_READER)], "ports": [{"port": "admin"}]},
        {"from": [_of_cluster(plan, ("scheduler",))]},
    ]
    return _policy(plan, plan.scheduler_name, ("scheduler",), ingress)


def _engines(plan: Plan) -> Object:
    """Engines open ports of their own choosing to each other (transfer engine, NIXL): no list would hold."""
    peers = _of_cluster(plan, ("scheduler", *_ENGINE_ROLES, *_STORE_ROLES))
    return _policy(plan, f"{plan.name}-engines", _ENGINE_ROLES, [{"from": [peers]}, _metrics()])


def _store(plan: Plan) -> Object:
    peers = _of_cluster(plan, ("scheduler", *_ENGINE_ROLES, *_STORE_ROLES))
    allowed = [{"from": [peers, _anywhere(OPERATOR)]}, _metrics()]
    return _policy(plan, f"{plan.name}-store", _STORE_ROLES, allowed)


def _redis(plan: Plan) -> Object:
    peers = _of_cluster(plan, ("scheduler", *_ENGINE_ROLES))
    return _policy(plan, plan.redis_name, ("redis",), [{"from": [peers], "ports": [{"port": "redis"}]}])


def _metrics() -> Object:
    """What Prometheus reads, wherever it runs."""
    return {"from": [_anywhere(METRICS_READER)]}


def _policy(plan: Plan, name: str, roles: Sequence[str], ingress: Sequence[Object]) -> Object:
    spec = {
        "podSelector": _selector(plan, roles),
        "policyTypes": ["Ingress"],
        "ingress": list(ingress),
    }
    own = labels(plan, "network")
    return an_object(plan, "networking.k8s.io/v1", "NetworkPolicy", name, own, spec=spec)


def _of_cluster(plan: Plan, roles: Sequence[str]) -> Object:
    return {"podSelector": _selector(plan, roles)}


def _anywhere(pod_labels: dict[str, str]) -> Object:
    return {"namespaceSelector": _EVERYWHERE, "podSelector": {"matchLabels": pod_labels}}


def _selector(plan: Plan, roles: Sequence[str]) -> Object:
    return {
        "matchLabels": {"mooncake.io/cluster": plan.name},
        "matchExpressions": [{"key": "mooncake.io/role", "operator": "In", "values": list(roles)}],
    }
