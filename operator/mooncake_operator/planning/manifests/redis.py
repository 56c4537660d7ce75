"""The Redis that a cluster manages: memory only, for sidecars refill what it loses."""

from __future__ import annotations

from mooncake_core.api.pods import PodTemplate
from mooncake_operator.planning.manifests.objects import (
    REDIS_DIR,
    UNPRIVILEGED,
    Object,
    digest,
    env,
    labels,
    mount,
    pod_ip,
    reference,
    secret,
    service,
)
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.manifests.pods import a_pod, revision_of
from mooncake_operator.planning.manifests.sharing import PASSWORD_KEY
from mooncake_operator.planning.names import Port

PASSWORD_HASH = "mooncake.io/password-hash"
"""Annotation of the managed Redis' Pod: of which password it knows."""
_CONFIG_KEY = "redis.conf"
_REQUESTS = {"redis": {"cpu": "50m", "memory": "128Mi"}}
_SETTINGS = (
    'save ""',
    "appendonly no",
    # Evicting a reservation or a bucket of the index would be silent corruption.
    "maxmemory-policy noeviction",
    # Buckets of the index stay compact up to this size (the only name Redis 6.2 knows).
    "hash-max-ziplist-value 1024",
    "hash-max-ziplist-entries 512",
)


def is_password(text: str) -> bool:
    """Whether a line of Redis' configuration takes it as it is."""
    return text.isascii() and text.isalnum()


def redis_objects(plan: Plan) -> tuple[list[Object], list[Object], list[Object]]:
    """Pods, Services and Secrets of the managed Redis; nothing where there is none.

    Raises:
        ValueError: no password was given.
    """
    if not plan.manages_redis:
        return [], [], []
    password = plan.credentials.redis_password
    if not is_password(password):
        raise ValueError(
            "a managed Redis needs a password of ASCII letters and digits:"
            " give Credentials(redis_password=…), e.g. secrets.token_hex(16)"
        )
    (name,) = plan.redis_pods()
    settings = "\n".join([*_SETTINGS, f"requirepass {password}", ""])
    return (
        [redis_pod(plan, name)],
        [_service(plan, name)],
        [secret(plan, plan.redis_name, "redis", {PASSWORD_KEY: password, _CONFIG_KEY: settings})],
    )


def redis_revision(plan: Plan) -> str:
    """Hash of the managed Redis' Pod."""
    return revision_of(redis_pod(plan.anonymous(), plan.redis_name))


def redis_pod(plan: Plan, name: str) -> Object:
    """The managed Redis' Pod."""
    port = plan.names.port(name, Port.REDIS)
    probe = {"tcpSocket": {"port": "redis"}}
    # Redis' image starts as root and would become its own user by a script that is not run here.
    user = {} if plan.images.redis_user is None else {"runAsUser": plan.images.redis_user}
    container: Object = {
        "name": "redis",
        "image": plan.images.redis,
        "securityContext": {**UNPRIVILEGED["securityContext"], **user},
        # The password is in the file, where no list of processes shows it.
        "command": ["redis-server", f"{reference(REDIS_DIR[0])}/{_CONFIG_KEY}"],
        "args": ["--port", str(port), "--bind", plan.names.listen_host],
        "env": [pod_ip(), env(*REDIS_DIR)],
        "ports": [{"name": "redis", "containerPort": port}],
        "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {**probe, "periodSeconds": 5},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [mount("redis", REDIS_DIR)],
    }
    volumes = [{"name": "redis", "secret": {"secretName": plan.redis_name}}]
    own = labels(plan, "redis", role="redis", instance=name)
    pod = a_pod(
        plan,
        name,
        own,
        [container],
        volumes,
        subdomain=plan.redis_name,
        template=_template(plan),
        requests=_REQUESTS,
    )
    # Redis reads it when it starts, all others when they connect: a Secret made anew must make a Redis anew.
    password_hash = {PASSWORD_HASH: digest(plan.credentials.redis_password)}
    annotations = {**pod["metadata"].get("annotations", {}), **password_hash}
    return {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}


def _template(plan: Plan) -> PodTemplate | None:
    redis = plan.cluster.spec.scheduler.redis
    return redis.managed.pod_template if redis is not None and redis.managed is not None else None


def _service(plan: Plan, pod: str) -> Object:
    selector = {"mooncake.io/cluster": plan.name, "mooncake.io/role": "redis"}
    port = plan.names.port(pod, Port.REDIS)
    return service(plan, plan.redis_name, "redis", selector, [("redis", port, "redis")])
