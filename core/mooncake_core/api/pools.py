"""Prefill and decode pools: as entries of a cluster, and as objects of their own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mooncake_core.api.base import ApiModel, Rule, Write
from mooncake_core.api.metadata import CLUSTER_REF_IS_IMMUTABLE, ClusterReference, ObjectMeta
from mooncake_core.api.network import HugepagesSpec
from mooncake_core.api.pods import Drain, EnginePodTemplate, InstanceSpec, Resources, Scheduling
from mooncake_core.api.scalars import Name, Replicas
from mooncake_core.api.status import PoolStatus
from mooncake_core.api.support import not_yet, not_yet_value

EntryName = Annotated[Name, Write("a name of its own, small letters, digits and '-', e.g. prefill")]


class Autoscaling(ApiModel):
    """Who decides how many instances there are."""

    mode: Literal["None", "External", "SLO"] = "None"
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        not_yet_value(
            "mode",
            lambda a: a.mode == "None",
            "self.mode == 'None'",
            "autoscaling",
            "write None, or leave autoscaling out, and set replicas",
        ),
        not_yet("minReplicas", "min_replicas", "leave it out"),
        not_yet("maxReplicas", "max_replicas", "leave it out"),
        Rule(
            lambda a: a.min_replicas is None or a.max_replicas is None or a.min_replicas <= a.max_replicas,
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "must be <= maxReplicas",
            at="minReplicas",
        ),
    )


class Update(ApiModel):
    """How a pool's instances are replaced by those of a new revision."""

    max_surge: Annotated[int, Field(ge=0, le=1000), Write("instances above replicas, e.g. 1")] = 1
    """Instances that may exist above `replicas`, inside `coordination.gpuBudget`."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000), Write("instances, e.g. 1")] = 1
    """Instances that may be missing where there is no room for a surge."""
    partition: Annotated[int, Field(ge=0, le=1000), Write("instances that stay old, e.g. 1")] = 0
    """Instances that stay at the old revision: a canary with replicas - 1, all of them with replicas."""
    paused: bool = False
    """Whether replacing stops where it is; scale and repair go on."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda u: u.max_surge + u.max_unavailable > 0,
            "self.maxSurge + self.maxUnavailable > 0",
            "maxSurge and maxUnavailable must not both be 0; write maxSurge: 1, or maxUnavailable: 1",
        ),
    )


class Disruption(ApiModel):
    """What nodes' drains and rollouts leave standing."""

    min_available: Annotated[int, Field(ge=0, le=1000), Write("instances, e.g. 2")] | None = None
    """Instances that must stay; left out: all but one."""


class EnginePool(ApiModel):
    """Instances of one role: what entries and pool objects have in common."""

    replicas: Replicas = 1
    """Instances; not part of the revision."""
    instance: InstanceSpec = Field(default_factory=InstanceSpec)
    resources: Resources = Field(default_factory=Resources)
    hugepages: HugepagesSpec | None = None
    autoscaling: Autoscaling | None = None
    drain: Drain = Field(default_factory=Drain)
    update: Update = Field(default_factory=Update)
    disruption: Disruption = Field(default_factory=Disruption)
    scheduling: Scheduling = Field(default_factory=Scheduling)
    pod_template: EnginePodTemplate | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        not_yet("hugepages", "hugepages", "leave it out"),
        Rule(
            lambda p: (
                p.resources.gpu is None
                or p.instance.size * p.resources.gpu.count == p.instance.parallelism.devices
            ),
            "!has(self.resources.gpu) || self.instance.size * self.resources.gpu.count == "
            "self.instance.parallelism.tensor * self.instance.parallelism.pipeline"
            " * self.instance.parallelism.data",
            "instance.size × resources.gpu.count must equal tensor × pipeline × data of instance.parallelism;"
            " write e.g. size 1, gpu.count 8 and tensor 8",
            at="instance",
        ),
    )

    @property
    def gpus(self) -> int:
        """GPUs that all instances take together."""
        gpu = self.resources.gpu
        return 0 if gpu is None else self.replicas * self.instance.size * gpu.count


class EnginePoolEntry(EnginePool):
    """A pool written inside a cluster; the pool object is called `<cluster>-<name>`."""

    name: EntryName


class EnginePoolSpec(EnginePool):
    """A pool as an object of its own."""

    cluster_ref: ClusterReference
    declared_replicas: Replicas | None = None
    """The inline number as last seen by the operator; left out in pools written on their own."""

    SERVER_RULES: ClassVar[tuple[Rule, ...]] = (CLUSTER_REF_IS_IMMUTABLE,)


class MooncakePrefillPool(ApiModel):
    """Instances that compute prompts."""

    api_version: Literal["mooncake.io/v1alpha1"] = "mooncake.io/v1alpha1"
    kind: Literal["MooncakePrefillPool"] = "MooncakePrefillPool"
    metadata: ObjectMeta
    spec: EnginePoolSpec
    status: PoolStatus | None = None


class MooncakeDecodePool(ApiModel):
    """Instances that produce tokens."""

    api_version: Literal["mooncake.io/v1alpha1"] = "mooncake.io/v1alpha1"
    kind: Literal["MooncakeDecodePool"] = "MooncakeDecodePool"
    metadata: ObjectMeta
    spec: EnginePoolSpec
    status: PoolStatus | None = None
