"""MooncakeCluster: the one object that most users write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mooncake_core.api.base import ApiModel, Problem, Rule, server_rule
from mooncake_core.api.coordination import Coordination
from mooncake_core.api.engine import EngineSpec, ModelSpec
from mooncake_core.api.kvcache import KVCachePoolEntry
from mooncake_core.api.metadata import ObjectMeta
from mooncake_core.api.network import NetworkSpec
from mooncake_core.api.pools import EnginePoolEntry
from mooncake_core.api.scalars import MAX_NAME
from mooncake_core.api.scheduler import SchedulerSpec
from mooncake_core.api.slo import SloSpec
from mooncake_core.api.status import ClusterStatus

MAX_ENTRIES = 16

EnginePoolEntries = Annotated[
    list[EnginePoolEntry], Field(max_length=MAX_ENTRIES, json_schema_extra={"x-map-keys": ["name"]})
]
KVCachePoolEntries = Annotated[
    list[KVCachePoolEntry], Field(max_length=MAX_ENTRIES, json_schema_extra={"x-map-keys": ["name"]})
]

RESERVED_ENTRY_NAMES = ("admin", "redis", "scheduler")
"""`<cluster>-<name>` belongs to the cluster's own objects."""
MASTER_SUFFIX = "-master"
"""`<store>-master` belongs to the store's masters."""


class MooncakeClusterSpec(ApiModel):
    """What a cluster serves, with what, how fast, and on which pools."""

    model: ModelSpec
    engine: EngineSpec
    slo: SloSpec = Field(default_factory=SloSpec)
    network: NetworkSpec = Field(default_factory=NetworkSpec)
    prefill_pools: EnginePoolEntries = Field(default_factory=list)
    decode_pools: EnginePoolEntries = Field(default_factory=list)
    kv_cache_pools: KVCachePoolEntries = Field(default_factory=list)
    coordination: Coordination = Field(default_factory=Coordination)
    scheduler: SchedulerSpec = Field(default_factory=SchedulerSpec)

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: len(s.kv_cache_pools) <= 1,
            "size(self.kvCachePools) <= 1",
            "more than one store in a cluster is not yet supported; write one with more replicas",
            at="kvCachePools",
        ),
        Rule(
            lambda s: s.engine.type == "Simulated" or all(pool.ssd is None for pool in s.kv_cache_pools),
            "self.engine.type == 'Simulated' || self.kvCachePools.all(p, !has(p.ssd))",
            "ssd is not yet supported with real engines; remove it",
            at="kvCachePools",
        ),
        Rule(
            lambda s: s.coordination.ratio is None or s.coordination.ratio.allows(*s.instances),
            "!has(self.coordination.ratio) || "
            "self.prefillPools.size() == 0 || self.decodePools.size() == 0 || "
            "((!has(self.coordination.ratio.minPrefillPerDecode) || "
            "double(self.prefillPools.map(p, p.replicas).sum())"
            " / double(self.decodePools.map(p, p.replicas).sum()) >= "
            "double(self.coordination.ratio.minPrefillPerDecode)) && "
            "(!has(self.coordination.ratio.maxPrefillPerDecode) || "
            "double(self.prefillPools.map(p, p.replicas).sum())"
            " / double(self.decodePools.map(p, p.replicas).sum()) <= "
            "double(self.coordination.ratio.maxPrefillPerDecode)))",
            "the replicas of prefillPools and decodePools do not keep it; change replicas or the bounds",
            at="coordination.ratio",
        ),
        Rule(
            lambda s: s.coordination.gpu_budget is None or s.gpus <= s.coordination.gpu_budget,
            "!has(self.coordination.gpuBudget) || "
            "self.prefillPools.map(p, has(p.resources.gpu) ? "
            "p.replicas * p.instance.size * p.resources.gpu.count : 0).sum() + "
            "self.decodePools.map(p, has(p.resources.gpu) ? "
            "p.replicas * p.instance.size * p.resources.gpu.count : 0).sum()"
            " <= self.coordination.gpuBudget",
            "the pools take more GPUs than that; write a larger budget or fewer replicas",
            at="coordination.gpuBudget",
        ),
    )

    SERVER_RULES: ClassVar[tuple[Rule, ...]] = (
        server_rule(
            "self.prefillPools.all(p, !self.decodePools.exists(d, d.name == p.name) && "
            "!self.kvCachePools.exists(k, k.name == p.name)) && "
            "self.decodePools.all(d, !self.kvCachePools.exists(k, k.name == d.name))",
            "names must be unique over prefillPools, decodePools and kvCachePools; rename one of them",
        ),
        *(
            server_rule(
                f"!self.kvCachePools.exists(k, self.{field}.exists(p, p.name == k.name + '{MASTER_SUFFIX}'))",
                f"the name of a kvCachePool with {MASTER_SUFFIX} is its masters'; choose another name",
                at=field,
            )
            for field in ("prefillPools", "decodePools")
        ),
        *(
            server_rule(
                f"!self.{field}.exists(p, p.name in [{', '.join(map(repr, RESERVED_ENTRY_NAMES))}])",
                f"the names {', '.join(RESERVED_ENTRY_NAMES)} are taken by the cluster; choose another name",
                at=field,
            )
            for field in ("prefillPools", "decodePools", "kvCachePools")
        ),
    )

    @property
    def instances(self) -> tuple[int, int]:
        """Prefill and decode instances of the inline pools."""
        return sum(p.replicas for p in self.prefill_pools), sum(p.replicas for p in self.decode_pools)

    @property
    def gpus(self) -> int:
        """GPUs that the inline pools take together."""
        return sum(pool.gpus for pool in (*self.prefill_pools, *self.decode_pools))

    def entries(self) -> Iterator[tuple[str, EnginePoolEntry | KVCachePoolEntry]]:
        """Inline pools with their path in the manifest."""
        fields: tuple[tuple[str, Sequence[EnginePoolEntry | KVCachePoolEntry]], ...] = (
            ("prefillPools", self.prefill_pools),
            ("decodePools", self.decode_pools),
            ("kvCachePools", self.kv_cache_pools),
        )
        for field, pools in fields:
            for position, pool in enumerate(pools):
                yield f"{field}[{position}]", pool

    def problems(self) -> Iterator[Problem]:
        seen: dict[str, str] = {}
        masters = {f"{store.name}{MASTER_SUFFIX}" for store in self.kv_cache_pools}
        for at, pool in self.entries():
            if pool.name in seen:
                message = f"{pool.name} is also the name of {seen[pool.name]}; give each pool its own"
                yield Problem(f"{at}.name", message)
            seen.setdefault(pool.name, at)
            if pool.name in RESERVED_ENTRY_NAMES:
                yield Problem(
                    f"{at}.name", f"{pool.name} is taken by the cluster itself; choose another name"
                )
            if pool.name in masters:
                yield Problem(f"{at}.name", f"{pool.name} is taken by a store's masters; choose another name")


class MooncakeCluster(ApiModel):
    """A model served by prefill, decode and KV cache pools behind one scheduler."""

    api_version: Literal["mooncake.io/v1alpha1"] = "mooncake.io/v1alpha1"
    kind: Literal["MooncakeCluster"] = "MooncakeCluster"
    metadata: ObjectMeta
    spec: MooncakeClusterSpec
    status: ClusterStatus | None = None

    SERVER_RULES: ClassVar[tuple[Rule, ...]] = tuple(
        server_rule(
            f"self.spec.{field}.all(p, size(self.metadata.name) + 1 + size(p.name) <= {MAX_NAME})",
            f"<cluster>-<name> must have at most {MAX_NAME} characters; shorten one of the two",
            at=f"spec.{field}",
        )
        for field in ("prefillPools", "decodePools", "kvCachePools")
    )

    def problems(self) -> Iterator[Problem]:
        for at, pool in self.spec.entries():
            if len(f"{self.metadata.name}-{pool.name}") > MAX_NAME:
                full = f"{self.metadata.name}-{pool.name}"
                message = f"{full} has more than {MAX_NAME} characters; shorten one of the two"
                yield Problem(f"spec.{at}.name", message)
