"""KV cache pools: a Mooncake store with its master and the nodes that hold segments."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mooncake_core.api.base import ApiModel, Rule, Write
from mooncake_core.api.metadata import CLUSTER_REF_IS_IMMUTABLE, ClusterReference, ObjectMeta
from mooncake_core.api.network import HugepagesSpec
from mooncake_core.api.pods import Resources, Scheduling, StorePodTemplate
from mooncake_core.api.pools import EntryName
from mooncake_core.api.scalars import AbsolutePath, Quantity, Ratio, Replicas, Seconds, Text, quantity
from mooncake_core.api.status import KVCachePoolStatus
from mooncake_core.api.support import not_yet


class Ssd(ApiModel):
    """The tier below DRAM, on a disk of each node."""

    size: Annotated[Quantity, Write('a quantity as text, e.g. "2Ti"')]
    path: AbsolutePath
    promotion: Literal["Predicted", "None"] = "Predicted"
    """Whether blocks of a conversation are brought back to DRAM before its next turn, and kept there until
    then; needs scheduler.redis."""


class Eviction(ApiModel):
    """When the master makes room, and how much."""

    high_watermark: Annotated[Ratio, Write('a share as text, e.g. "0.90"')] = "0.90"
    ratio: Annotated[Ratio, Write('a share as text, e.g. "0.05"')] = "0.05"

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda e: 0 < float(e.high_watermark) <= 1,
            "double(self.highWatermark) > 0.0 && double(self.highWatermark) <= 1.0",
            'must be above 0 and at most 1; write e.g. "0.90"',
            at="highWatermark",
        ),
        Rule(
            lambda e: 0 < float(e.ratio) <= 1,
            "double(self.ratio) > 0.0 && double(self.ratio) <= 1.0",
            'must be above 0 and at most 1; write e.g. "0.05"',
            at="ratio",
        ),
    )


class Master(ApiModel):
    """The process that knows where each object of the store lies."""

    replicas: Annotated[int, Field(ge=1, le=5), Write("1")] = 1
    eviction: Eviction = Field(default_factory=Eviction)
    kv_lease_seconds: Seconds = 10
    """How long an object that was read is kept from eviction."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda m: m.replicas == 1,
            "self.replicas == 1",
            "more than one master is not yet supported; write 1",
            at="replicas",
        ),
    )


class KVCachePool(ApiModel):
    """A store: what entries and pool objects have in common."""

    replicas: Replicas = 1
    """Nodes that hold a segment."""
    segment_size: Annotated[Quantity, Write('a quantity as text, e.g. "200Gi"')]
    """DRAM that each node gives to the store."""
    image: Annotated[Text, Write("a container image with mooncake_master and mooncake_client")] | None = None
    """Left out: the engine's image."""
    ssd: Ssd | None = None
    master: Master = Field(default_factory=Master)
    resources: Resources = Field(default_factory=Resources)
    hugepages: HugepagesSpec | None = None
    scheduling: Scheduling = Field(default_factory=Scheduling)
    pod_template: StorePodTemplate | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        not_yet("hugepages", "hugepages", "leave it out"),
        Rule(
            lambda p: quantity(p.segment_size) > 0,
            "quantity(self.segmentSize).isGreaterThan(quantity('0'))",
            'must be more than 0; write e.g. "200Gi"',
            at="segmentSize",
        ),
        Rule(
            lambda p: p.resources.memory is None or quantity(p.segment_size) <= quantity(p.resources.memory),
            "!has(self.resources.memory) || "
            "quantity(self.segmentSize).compareTo(quantity(self.resources.memory)) <= 0",
            "must fit into resources.memory; write a smaller segment or more memory",
            at="segmentSize",
        ),
        Rule(
            lambda p: p.resources.gpu is None,
            "!has(self.resources.gpu)",
            "a store needs no GPU; remove it",
            at="resources.gpu",
        ),
    )


class KVCachePoolEntry(KVCachePool):
    """A store written inside a cluster; the pool object is called `<cluster>-<name>`."""

    name: EntryName


class KVCachePoolSpec(KVCachePool):
    """A store as an object of its own."""

    cluster_ref: ClusterReference
    declared_replicas: Replicas | None = None
    """The inline number as last seen by the operator; left out in pools written on their own."""

    SERVER_RULES: ClassVar[tuple[Rule, ...]] = (CLUSTER_REF_IS_IMMUTABLE,)


class MooncakeKVCachePool(ApiModel):
    """A Mooncake store that prefill and decode instances share."""

    api_version: Literal["mooncake.io/v1alpha1"] = "mooncake.io/v1alpha1"
    kind: Literal["MooncakeKVCachePool"] = "MooncakeKVCachePool"
    metadata: ObjectMeta
    spec: KVCachePoolSpec
    status: KVCachePoolStatus | None = None
