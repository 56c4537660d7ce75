"""The schedulers: configuration, their Deployment, and the Pods it stands for where nothing expands it."""

from __future__ import annotations

from typing import Any

from mooncake_core.api.scalars import duration_s
from mooncake_core.api.scheduler import Routing
from mooncake_core.api.slo import SloTarget
from mooncake_core.config import (
    AdmissionConfig,
    AdmissionMode,
    AuthConfig,
    InstanceShape,
    ListenConfig,
    RoutingConfig,
    SchedulerConfig,
    SloConfig,
    StoppingConfig,
)
from mooncake_operator.planning.manifests.capacity import kv_cache_dtype
from mooncake_operator.planning.manifests.instances import as_documents, static_instances
from mooncake_operator.planning.manifests.objects import (
    ADMIN_DIR,
    API_KEYS_DIR,
    CONFIG_DIR,
    UNPRIVILEGED,
    Object,
    an_object,
    config_map,
    digest,
    env,
    http_get,
    labels,
    liveness,
    mount,
    pod_ip,
    reference,
    secret,
)
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.manifests.pods import model_files
from mooncake_operator.planning.manifests.sharing import redis_access, shared_namespace
from mooncake_operator.planning.manifests.template import finished
from mooncake_operator.planning.names import Port

CONFIG_FILE = "scheduler.json"
INSTANCES_FILE = "instances.json"
TOKEN_KEY = "token"
_REQUESTS = {"scheduler": {"cpu": "250m", "memory": "256Mi"}}
_GRACE_S = 600
_LAST_WRITES_S = 15
"""Of the grace period: to give back what is reserved, and leave Redis."""


def scheduler_config(plan: Plan) -> SchedulerConfig:
    """What all schedulers of a cluster are told."""
    spec = plan.cluster.spec
    access = redis_access(plan)
    sees_model = plan.names.shares_files or spec.model.volume is not None
    first_admin_port = plan.names.port(plan.scheduler_pods()[0], Port.ADMIN)
    return SchedulerConfig(
        cluster=plan.name,
        model=spec.model.name,
        model_path=spec.model.path if sees_model else None,
        serving=ListenConfig(host=plan.names.listen_host, port=plan.names.serving_port),
        admin=ListenConfig(host=plan.names.listen_host, port=first_admin_port),
        redis_url=access.url if access else None,
        redis_password_file=access.password_file if access else None,
        namespace=shared_namespace(plan),
        instances_file=None if access else f"{reference(CONFIG_DIR[0])}/{INSTANCES_FILE}",
        profile=spec.engine.profile,
        shapes=_shapes(plan),
        kv_cache_dtype=kv_cache_dtype(spec.engine),
        time_scale=spec.engine.time_scale,
        promoted_store=_promoted_store(plan),
        slo=_slo(spec.slo.ttft, spec.slo.tbt),
        routing=_routing(spec.scheduler.routing),
        admission=AdmissionConfig(
            mode=AdmissionMode(spec.scheduler.admission.mode),
            priority_floor=spec.scheduler.admission.priority_floor,
        ),
        auth=_auth(plan),
        stopping=_stopping(plan),
    )


def scheduler_config_map(plan: Plan) -> Object:
    """The schedulers' documents; without Redis the instances are among them."""
    documents: dict[str, Any] = {
        CONFIG_FILE: scheduler_config(plan).model_dump(mode="json", exclude_none=True)
    }
    if not plan.shares_state:
        documents[INSTANCES_FILE] = as_documents(static_instances(plan))
    return config_map(plan, plan.scheduler_name, "scheduler", documents)


def admin_secret(plan: Plan) -> list[Object]:
    """The admin port's token, where there is one."""
    if not plan.credentials.admin_token:
        return []
    return [secret(plan, f"{plan.name}-admin", "scheduler", {TOKEN_KEY: plan.credentials.admin_token})]


def scheduler_deployment(plan: Plan) -> Object:
    """What Kubernetes runs schedulers from."""
    own = labels(plan, "scheduler", role="scheduler")
    # A changed configuration must restart them; instances.json is read again by itself.
    annotations = {"mooncake.io/config": digest(scheduler_config(plan).model_dump(mode="json"))}
    template = {"metadata": {"labels": own, "annotations": annotations}, "spec": _pod_spec(plan, [])}
    template = finished(template, plan.cluster.spec.scheduler.pod_template, _REQUESTS)
    selector = {key: own[key] for key in ("mooncake.io/cluster", "mooncake.io/role")}
    spec = {
        "replicas": plan.cluster.spec.scheduler.replicas,
        "selector": {"matchLabels": selector},
        "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": template,
    }
    return an_object(plan, "apps/v1", "Deployment", plan.scheduler_name, own, spec=spec)


def scheduler_pods(plan: Plan) -> list[Object]:
    """The Deployment's Pods by name; they share the serving port, each has an admin port of its own."""
    pods = []
    for pod in plan.scheduler_pods():
        ports = [
            *("--serving-port", str(plan.names.serving_port)),
            *("--admin-port", str(plan.names.port(pod, Port.ADMIN))),
        ]
        own = labels(plan, "scheduler", role="scheduler", instance=pod)
        spec = _pod_spec(plan, ports, admin_port=plan.names.port(pod, Port.ADMIN))
        rendered = an_object(plan, "v1", "Pod", pod, own, spec={**spec, "hostname": pod})
        pods.append(finished(rendered, plan.cluster.spec.scheduler.pod_template, _REQUESTS))
    return pods


def _pod_spec(plan: Plan, more_arguments: list[str], *, admin_port: int | None = None) -> Object:
    volumes, mounts, variables = _storage(plan)
    admin_port = admin_port or plan.names.port(plan.scheduler_pods()[0], Port.ADMIN)
    container: Object = {
        "name": "scheduler",
        "image": plan.images.mooncake,
        **UNPRIVILEGED,
        "command": ["python", "-m", "mooncake_scheduler"],
        "args": ["--config", f"{reference(CONFIG_DIR[0])}/{CONFIG_FILE}", *more_arguments],
        "env": [pod_ip(), *variables],
        "ports": [
            {"name": "serving", "containerPort": plan.names.serving_port},
            {"name": "admin", "containerPort": admin_port},
        ],
        # By the admin port: where several share the serving port, it answers for any of them.
        "startupProbe": http_get(
            "/healthz", "admin", periodSeconds=1, timeoutSeconds=5, failureThreshold=120
        ),
        "readinessProbe": http_get("/readyz", "admin", periodSeconds=2, timeoutSeconds=5),
        "livenessProbe": liveness("/healthz", "admin"),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,
        "containers": [container],
        "volumes": volumes,
    }


def _storage(plan: Plan) -> tuple[list[Object], list[Object], list[Object]]:
    """Volumes, mounts and the variables that name their folders."""
    volumes: list[Object] = [{"name": "config", "configMap": {"name": plan.scheduler_name}}]
    mounts, variables = [mount("config", CONFIG_DIR)], [env(*CONFIG_DIR)]
    model_volumes, model_mounts = model_files(plan.cluster.spec.model)
    volumes, mounts = [*volumes, *model_volumes], [*mounts, *model_mounts]
    if access := redis_access(plan):
        volumes, mounts = [*volumes, *access.volumes], [*mounts, *access.mounts]
        variables += access.env
    if plan.credentials.admin_token:
        volumes.append({"name": "admin", "secret": {"secretName": f"{plan.name}-admin"}})
        mounts.append(mount("admin", ADMIN_DIR))
        variables.append(env(*ADMIN_DIR))
    if keys := plan.cluster.spec.scheduler.auth.api_key_secret_ref:
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.name}})
        mounts.append(mount("api-keys", API_KEYS_DIR))
        variables.append(env(*API_KEYS_DIR))
    return volumes, mounts, variables


def _promoted_store(plan: Plan) -> str:
    """The store whose SSD is read ahead of turns; sidecars do that, and they are where Redis is."""
    ssd = plan.store.spec.ssd if plan.store is not None and plan.shares_state else None
    return plan.store.name if plan.store and ssd and ssd.promotion == "Predicted" else ""


def _stopping(plan: Plan) -> StoppingConfig:
    lag_s = plan.names.endpoints_lag_s
    return StoppingConfig(announced_s=lag_s, streams_s=_GRACE_S - lag_s - _LAST_WRITES_S)


def _shapes(plan: Plan) -> dict[str, InstanceShape]:
    """Pools whose instances are faster than the profile says; real engines have none, they are learnt."""
    if plan.cluster.spec.engine.profile is None:
        return {}
    instances = {pool.name: pool.spec.instance for pool in plan.engine_pools}
    return {
        name: InstanceShape(
            pods=instance.size,
            tensor=instance.parallelism.tensor,
            pipeline=instance.parallelism.pipeline,
        )
        for name, instance in instances.items()
        if instance.size > 1
    }


def _auth(plan: Plan) -> AuthConfig:
    keys = plan.cluster.spec.scheduler.auth.api_key_secret_ref
    has_token = bool(plan.credentials.admin_token)
    return AuthConfig(
        api_keys_file=f"{reference(API_KEYS_DIR[0])}/{keys.key}" if keys else None,
        admin_token_file=f"{reference(ADMIN_DIR[0])}/{TOKEN_KEY}" if has_token else None,
    )


def _routing(routing: Routing) -> RoutingConfig:
    return RoutingConfig(
        policy=routing.policy,
        balancing_threshold=float(routing.balancing_threshold),
        disaggregation_threshold_tokens=routing.disaggregation_threshold_tokens,
        queue_order=routing.queue_order,
        seed=routing.seed,
    )


def _slo(ttft: SloTarget | None, tbt: SloTarget | None) -> SloConfig:
    fields: dict[str, Any] = {}
    for name, target in (("ttft", ttft), ("tbt", tbt)):
        if target is None:
            continue
        fields[f"{name}_percentile"] = target.percentile
        if target.target is not None:
            fields[f"{name}_s"] = duration_s(target.target)
        if target.multiplier is not None:
            fields[f"{name}_multiplier"] = float(target.multiplier)
    return SloConfig(**fields)
