"""How schedulers and sidecars reach the Redis that they share."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_operator.planning.manifests.objects import (
    REDIS_DIR,
    REDIS_URL,
    Object,
    env,
    mount,
    reference,
)
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.names import Port

PASSWORD_KEY = "password"
URL_KEY = "url"


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """What a container needs to use the shared Redis."""

    url: str
    password_file: str | None
    env: tuple[Object, ...]
    mounts: tuple[Object, ...]
    volumes: tuple[Object, ...]


def redis_access(plan: Plan) -> RedisAccess | None:
    """Access to the shared Redis; None where the one scheduler keeps its state in memory."""
    redis = plan.cluster.spec.scheduler.redis
    if redis is None:
        return None
    if redis.secret_ref is not None:
        source = {"secretKeyRef": {"name": redis.secret_ref.name, "key": URL_KEY}}
        return RedisAccess(reference(REDIS_URL), None, ({"name": REDIS_URL, "valueFrom": source},), (), ())
    host = plan.names.service_host(plan.redis_name, plan.namespace)
    port = plan.names.port(plan.redis_pods()[0], Port.REDIS)
    items = [{"key": PASSWORD_KEY, "path": PASSWORD_KEY}]
    return RedisAccess(
        url=f"redis://{host}:{port}/0",
        password_file=f"{reference(REDIS_DIR[0])}/{PASSWORD_KEY}",
        env=(env(*REDIS_DIR),),
        mounts=(mount("redis", REDIS_DIR),),
        volumes=({"name": "redis", "secret": {"secretName": plan.redis_name, "items": items}},),
    )


def shared_namespace(plan: Plan) -> str:
    """Prefix of the cluster's keys; a namespace has no dot, so that two clusters cannot mean the same."""
    return f"{plan.namespace}.{plan.name}"
