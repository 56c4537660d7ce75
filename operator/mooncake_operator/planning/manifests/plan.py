"""What is rendered from: a cluster, its pools however they were written, and the names of their Pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mooncake_core.api import (
    EnginePoolSpec,
    KVCachePoolSpec,
    MooncakeCluster,
    MooncakeDecodePool,
    MooncakeKVCachePool,
    MooncakePrefillPool,
    Pool,
)
from mooncake_core.api.base import ApiModel
from mooncake_core.api.cluster import MASTER_SUFFIX
from mooncake_core.api.metadata import ClusterReference, ObjectMeta
from mooncake_core.registry import EngineKind, Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.names import Names, TemplateNames, member_pod


@dataclass(frozen=True, slots=True)
class Images:
    """Images of the containers that are this product's own, or that it brings along."""

    mooncake: str = "mooncake-k8s:0.1.0"
    """Scheduler, sidecar, simulated engine and store: one image holds them all."""
    redis: str = "redis:7.4"
    redis_user: int | None = 65532
    """Whom Redis runs as, for its image begins as root; None = the platform says it (OpenShift does)."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Secrets that are made once and then kept: chance is the caller's."""

    redis_password: str = field(default="", repr=False)
    """Needed where the cluster manages its Redis."""
    admin_token: str = field(default="", repr=False)
    """Bearer token of the schedulers' admin port; empty = open to all who reach it."""


@dataclass(frozen=True, slots=True)
class EnginePoolPlan:
    """A prefill or decode pool."""

    name: str
    role: Role
    spec: EnginePoolSpec

    def instances(self) -> list[str]:
        """Names of its instances, and of their leading Pods."""
        letter = "p" if self.role is Role.PREFILL else "d"
        return [f"{self.name}-{letter}-{ordinal}" for ordinal in range(self.spec.replicas)]

    def pods(self) -> list[str]:
        """Names of all its Pods, each instance's leader before its workers."""
        ranks = range(self.spec.instance.size)
        return [member_pod(instance, rank) for instance in self.instances() for rank in ranks]


@dataclass(frozen=True, slots=True)
class Present:
    """An instance that is there, whatever is wanted now."""

    name: str
    pairing: str
    """The revision inside which it may be paired."""
    size: int = 1
    """Pods that it consists of."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """A KV cache pool."""

    name: str
    spec: KVCachePoolSpec

    @property
    def master_service(self) -> str:
        """Service in front of the master."""
        return f"{self.name}{MASTER_SUFFIX}"

    def masters(self) -> list[str]:
        """Names of the masters' Pods."""
        return [f"{self.master_service}-{ordinal}" for ordinal in range(self.spec.master.replicas)]

    def nodes(self) -> list[str]:
        """Names of the Pods that hold segments."""
        return [f"{self.name}-kv-{ordinal}" for ordinal in range(self.spec.replicas)]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one rendering needs to know."""

    cluster: MooncakeCluster
    names: Names
    engine_pools: tuple[EnginePoolPlan, ...]
    store: StorePlan | None
    images: Images
    credentials: Credentials
    present: Mapping[str, Sequence[Present]] | None = None
    """Engine instances that are there, for budgets, and for schedulers that read them from a file; None = all
    that are wanted."""

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.cluster.metadata.name

    @property
    def namespace(self) -> str:
        """The cluster's namespace."""
        return self.cluster.metadata.namespace

    def anonymous(self) -> Plan:
        """The same plan with nobody's addresses and ports, of which revisions are hashes."""
        return replace(self, names=TemplateNames())

    @property
    def simulated(self) -> bool:
        """Whether engines and store are simulated."""
        return self.cluster.spec.engine.type == "Simulated"

    @property
    def engine_kind(self) -> EngineKind:
        """The engines' kind as the registry knows it."""
        return EngineKind(self.cluster.spec.engine.type)

    @property
    def shares_state(self) -> bool:
        """Whether schedulers share a Redis, which is also where sidecars write."""
        return self.cluster.spec.scheduler.redis is not None

    @property
    def manages_redis(self) -> bool:
        """Whether that Redis is the cluster's own."""
        redis = self.cluster.spec.scheduler.redis
        return redis is not None and redis.managed is not None

    @property
    def scheduler_name(self) -> str:
        """Name of the schedulers' Deployment, Service and ConfigMap."""
        return f"{self.name}-scheduler"

    @property
    def redis_name(self) -> str:
        """Name of the managed Redis' Service and Secret."""
        return f"{self.name}-redis"

    def scheduler_pods(self) -> list[str]:
        """Names of the schedulers' Pods where no Deployment makes them."""
        return [f"{self.scheduler_name}-{n}" for n in range(self.cluster.spec.scheduler.replicas)]

    def redis_pods(self) -> list[str]:
        """Names of the managed Redis' Pods."""
        return [f"{self.redis_name}-0"] if self.manages_redis else []

    def pods(self) -> list[str]:
        """Names of all Pods, schedulers' included."""
        names = [pod for pool in self.engine_pools for pod in pool.pods()]
        if self.store is not None:
            names += [*self.store.masters(), *self.store.nodes()]
        return [*names, *self.redis_pods(), *self.scheduler_pods()]


def plan_of(
    cluster: MooncakeCluster,
    names: Names,
    pools: Sequence[Pool],
    *,
    images: Images,
    credentials: Credentials,
    present: Mapping[str, Sequence[Present]] | None = None,
) -> Plan:
    """Bring inline entries and pool objects of one cluster together.

    Raises:
        ValueError: a pool belongs to another cluster or contradicts the cluster; names it and the remedy.
    """
    every: list[Pool] = []
    for pool in (*inline_pools(cluster), *pools):
        if (why := objection(cluster, pool, beside=every)) is not None:
            raise ValueError(f"pool {pool.metadata.name}: {why.message}")
        every.append(pool)
    engines = tuple(_engine_pools(every))
    stores = [
        StorePlan(pool.metadata.name, pool.spec) for pool in every if isinstance(pool, MooncakeKVCachePool)
    ]
    return Plan(cluster, names, engines, stores[0] if stores else None, images, credentials, present)


def objection(cluster: MooncakeCluster, pool: Pool, *, beside: Sequence[Pool]) -> Finding | None:
    """Why a pool cannot be one of a cluster's, beside those that already are; None = it can."""
    name = pool.metadata.name
    if pool.spec.cluster_ref.name != cluster.metadata.name:
        why = f"its clusterRef does not name cluster {cluster.metadata.name}"
        return Finding(reasons.INVALID_SPEC, why)
    stores = [other.metadata.name for other in beside if isinstance(other, MooncakeKVCachePool)]
    if name in {*_own_names(cluster), *(f"{store}{MASTER_SUFFIX}" for store in stores)}:
        return Finding(reasons.POOL_NAME_TAKEN, f"{name} is the name of the cluster's own objects; rename it")
    if not isinstance(pool, MooncakeKVCachePool):
        return None
    if f"{name}{MASTER_SUFFIX}" in {other.metadata.name for other in beside}:
        why = f"pool {name}{MASTER_SUFFIX} has the name that its masters would have; rename one of them"
        return Finding(reasons.POOL_NAME_TAKEN, why)
    if stores:
        why = f"more than one store in a cluster is not yet supported; remove it, or {stores[0]}"
        return Finding(reasons.INVALID_SPEC, why)
    if pool.spec.ssd is not None and cluster.spec.engine.type != "Simulated":
        return Finding(reasons.INVALID_SPEC, "ssd is not yet supported with real engines; remove it")
    return None


def _own_names(cluster: MooncakeCluster) -> Iterator[str]:
    """What a cluster plans, or names objects of a pool's kinds after, without a pool."""
    yield f"{cluster.metadata.name}-scheduler"
    redis = cluster.spec.scheduler.redis
    if redis is not None and redis.managed is not None:
        yield f"{cluster.metadata.name}-redis"


def inline_pools(cluster: MooncakeCluster) -> list[Pool]:
    """The pool objects that a cluster's inline entries become, called `<cluster>-<entry>`."""
    reference = ClusterReference(name=cluster.metadata.name)

    def metadata(entry: str) -> ObjectMeta:
        return ObjectMeta(name=f"{cluster.metadata.name}-{entry}", namespace=cluster.metadata.namespace)

    pools: list[Pool] = []
    for entry in cluster.spec.prefill_pools:
        spec = EnginePoolSpec(cluster_ref=reference, declared_replicas=entry.replicas, **_fields(entry))
        pools.append(MooncakePrefillPool(metadata=metadata(entry.name), spec=spec))
    for entry in cluster.spec.decode_pools:
        spec = EnginePoolSpec(cluster_ref=reference, declared_replicas=entry.replicas, **_fields(entry))
        pools.append(MooncakeDecodePool(metadata=metadata(entry.name), spec=spec))
    for store in cluster.spec.kv_cache_pools:
        kv = KVCachePoolSpec(cluster_ref=reference, declared_replicas=store.replicas, **_fields(store))
        pools.append(MooncakeKVCachePool(metadata=metadata(store.name), spec=kv))
    return pools


def _fields(entry: ApiModel) -> dict[str, Any]:
    """What an entry shares with the pool object that it becomes: all but its name, as checked values."""
    return {name: value for name, value in entry if name != "name"}


def _engine_pools(pools: Sequence[Pool]) -> Iterator[EnginePoolPlan]:
    for pool in pools:
        if isinstance(pool, MooncakePrefillPool):
            yield EnginePoolPlan(pool.metadata.name, Role.PREFILL, pool.spec)
        elif isinstance(pool, MooncakeDecodePool):
            yield EnginePoolPlan(pool.metadata.name, Role.DECODE, pool.spec)
