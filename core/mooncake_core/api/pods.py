"""What users may say about the Pods of a pool beyond what is worked out for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from mooncake_core.api import managed, templates
from mooncake_core.api.base import ApiModel, Problem, Rule, Write, server_rule
from mooncake_core.api.scalars import DevicesPerInstance, ObjectName, Quantity, Seconds

LabelValue = Annotated[str, StringConstraints(max_length=63)]
AnnotationValue = Annotated[str, StringConstraints(max_length=4096)]


class TemplateMetadata(ApiModel):
    """Labels and annotations added to every Pod."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    annotations: Annotated[dict[str, AnnotationValue], Field(max_length=64)] = Field(default_factory=dict)

    SERVER_RULES: ClassVar[tuple[Rule, ...]] = (
        server_rule(
            f"self.labels.all(k, !k.matches('^({'|'.join(managed.LABEL_PREFIXES)})'))",
            f"labels of {' and '.join(managed.LABEL_PREFIXES)} belong to Mooncake; use your own domain",
            at="labels",
        ),
    )

    def problems(self) -> Iterator[Problem]:
        for label in sorted(self.labels):
            if label.startswith(managed.LABEL_PREFIXES):
                yield Problem("labels", f"{label} belongs to Mooncake; use a label of your own domain")


class PodTemplate(ApiModel):
    """A Pod template that is merged into the rendered one, lists by the keys that Kubernetes merges them by.

    The kinds of Pods differ in what is rendered, and so in what is refused.
    """

    metadata: TemplateMetadata = Field(default_factory=TemplateMetadata)
    spec: dict[str, Any] = Field(default_factory=dict, json_schema_extra={"x-any-object": True})
    """As in Kubernetes (nodeSelector, tolerations, affinity, volumes, containers …)."""

    RENDERED: ClassVar[templates.RenderedPod]

    def problems(self) -> Iterator[Problem]:
        return self.RENDERED.problems(self.spec)


class EnginePodTemplate(PodTemplate):
    """Merged into the Pods of an instance: containers `engine` and, its resources only, `sidecar`."""

    RENDERED: ClassVar[templates.RenderedPod] = templates.ENGINE


class StorePodTemplate(PodTemplate):
    """Merged into the Pods of a store's nodes: container `node`."""

    RENDERED: ClassVar[templates.RenderedPod] = templates.STORE_NODE


class SchedulerPodTemplate(PodTemplate):
    """Merged into the schedulers' Pods: container `scheduler`."""

    RENDERED: ClassVar[templates.RenderedPod] = templates.SCHEDULER


class RedisPodTemplate(PodTemplate):
    """Merged into the Pod of the managed Redis: container `redis`."""

    RENDERED: ClassVar[templates.RenderedPod] = templates.REDIS


class Gpu(ApiModel):
    """GPUs of each Pod of an instance."""

    resource_name: ObjectName = "nvidia.com/gpu"
    count: Annotated[int, Field(ge=1, le=64), Write("GPUs of one Pod, e.g. 8")]


class Resources(ApiModel):
    """What each Pod's main container asks for; requests and limits are the same."""

    cpu: Quantity | None = None
    memory: Quantity | None = None
    gpu: Gpu | None = None
    shared_memory: Annotated[Quantity, Write('a quantity as text, e.g. "64Gi"')] | None = None
    """Size of /dev/shm, over which the processes of an engine talk."""


class Parallelism(ApiModel):
    """How one instance spreads the model over its GPUs."""

    tensor: DevicesPerInstance = 1
    pipeline: DevicesPerInstance = 1
    data: DevicesPerInstance = 1

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda p: p.data == 1,
            "self.data == 1",
            "more than 1 is not yet supported; write 1 and more replicas",
            at="data",
        ),
    )

    @property
    def devices(self) -> int:
        """GPUs that one instance needs."""
        return self.tensor * self.pipeline * self.data


class InstanceSpec(ApiModel):
    """What one instance consists of."""

    size: Annotated[int, Field(ge=1, le=64), Write("Pods of one instance, e.g. 1")] = 1
    """Pods: a leader, which clients are sent to, and workers that compute with it."""
    parallelism: Parallelism = Field(default_factory=Parallelism)

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda i: i.parallelism.devices % i.size == 0,
            "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data % self.size == 0",
            "the Pods must share tensor × pipeline × data of parallelism evenly;"
            " write e.g. size 2 with pipeline 2, or size 1",
            at="size",
        ),
    )


class Drain(ApiModel):
    """How an instance is emptied before it goes."""

    timeout_seconds: Seconds = 600
    """How long its work in flight may take to end."""
    on_timeout: Literal["Force"] = "Force"
    """What happens then: it is ended, and its streams with an error."""


class Scheduling(ApiModel):
    """Where Pods are placed."""

    spread_topology_key: ObjectName | None = None
    """Node label over whose values a pool's instances are spread, e.g. kubernetes.io/hostname.

    The Pods of one instance are kept together inside one of its values where that is possible.
    """
