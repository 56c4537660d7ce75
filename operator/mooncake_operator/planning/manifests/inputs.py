"""What a user says of Pods: of this, revisions are hashes.

Not of the Pods as they are rendered. What the operator adds by itself, its image of the sidecar or a probe's
timing, changes with the operator's version, and an upgrade of the operator is no wish to replace engines.
Running instances, and those that are made for them, stay as their ControllerRevision has them; the next
revision that a user asks for brings along what is new.
"""

from __future__ import annotations

from typing import Any

from mooncake_core.api.base import ApiModel
from mooncake_core.api.scalars import BY_VALUE
from mooncake_core.api.scheduler import RedisSpec
from mooncake_operator.planning.manifests.objects import digest
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan, StorePlan

_NOT_OF_ENGINES = frozenset(
    {
        "replicas",
        "declaredReplicas",
        "clusterRef",
        "update",
        "disruption",
        "autoscaling",
        "name",
    }
)
"""Fields of a pool that say how many instances there are, and how they are replaced."""
_NOT_OF_STORE_NODES = _NOT_OF_ENGINES | {"master"}


def pool_revision(plan: Plan, pool: EnginePoolPlan) -> str:
    """Revision of a prefill or decode pool."""
    spec = plan.cluster.spec
    redis = spec.scheduler.redis
    return digest(
        {
            "role": pool.role.value,
            "model": written(spec.model),
            "engine": written(spec.engine),
            "network": written(spec.network),
            "redis": None if redis is None else _as_engines_see_it(redis),
            "store": None if plan.store is None else plan.store.name,
            "pool": _without(written(pool.spec), _NOT_OF_ENGINES),
        }
    )


def _as_engines_see_it(redis: RedisSpec) -> dict[str, Any]:
    """Whose Redis it is; where its Pod runs, and what it asks for, is no affair of engines."""
    seen = written(redis)
    if "managed" in seen:
        seen["managed"] = _without(seen["managed"], frozenset({"podTemplate"}))
    return seen


def pairing_revision(plan: Plan) -> str:
    """Hash of what both sides of a hand-over must agree on; the registry's `revision`.

    A pool's own revision would not do: prefill and decode pools never have the same template.
    """
    spec = plan.cluster.spec
    return digest([written(spec.model), written(spec.engine), written(spec.network), bool(plan.store)])


def store_revisions(plan: Plan, store: StorePlan) -> tuple[str, str]:
    """Revisions of a store's masters and of its nodes.

    Of the engines' wishes these take their image and their pace only: a store that is replaced holds nothing.
    """
    engine = plan.cluster.spec.engine
    image = store.spec.image or (None if plan.simulated else engine.image)
    common = {"simulated": plan.simulated, "image": image}
    master = _without(written(store.spec.master), frozenset({"replicas"}))
    pool = _without(written(store.spec), _NOT_OF_STORE_NODES)
    if "ssd" in pool:
        # What is read ahead is the schedulers' affair.
        pool["ssd"] = _without(pool["ssd"], frozenset({"promotion"}))
    node = {
        "profile": engine.profile,
        "timeScale": engine.time_scale,
        "protocol": plan.cluster.spec.network.protocol,
        "pool": pool,
    }
    return digest({**common, "master": master}), digest({**common, **node})


def written(spec: ApiModel) -> dict[str, Any]:
    """A part of a spec as its user wrote it, whatever the notation: 8Ti is no other wish than 8192Gi.

    Defaults that later versions add are none of it. (Those that are there do not change: the API server has
    written them into the objects.)
    """
    found: dict[str, Any] = spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, context=BY_VALUE
    )
    for name, field in type(spec).model_fields.items():
        key, value = field.alias or name, getattr(spec, name)
        if key not in found:
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(value, ApiModel):
            found[key] = written(value)
            is_default = isinstance(default, ApiModel) and found[key] == written(default)
        else:
            is_default = isinstance(default, str) and found[key] == _by_value(spec, name, key, default)
        if is_default:
            del found[key]  # the default, in another notation
    return found


def _by_value(spec: ApiModel, name: str, key: str, value: str) -> Any:
    blank = type(spec).model_construct(None, **{name: value})
    return blank.model_dump(mode="json", by_alias=True, include={name}, context=BY_VALUE)[key]


def _without(spec: dict[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if name not in fields}
