"""What the operator reports; written through `/status` only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from mooncake_core.api.base import ApiModel

Word = Annotated[str, StringConstraints(max_length=253)]
Sentence = Annotated[str, StringConstraints(max_length=32_768)]
Brief = Annotated[str, StringConstraints(max_length=1024)]
Timestamp = Annotated[str, StringConstraints(max_length=64), Field(json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0)]

MAX_INSTANCES_LISTED = 100
MAX_RECREATIONS = 2000
"""As many instances as a pool can have, its surge included: one that is left out is never made again."""
MAX_POOLS_LISTED = 64


class Condition(ApiModel):
    """A condition as Kubernetes' conventions have it."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    message: Sentence = ""
    last_transition_time: Timestamp
    observed_generation: Count | None = None


class InstanceStatus(ApiModel):
    """One instance of a pool."""

    name: Word
    node: Word | None = None
    revision: Word | None = None
    phase: Word | None = None


class Failure(ApiModel):
    """Why an instance was recreated."""

    instance: Word
    life: Word | None = None
    """uid of the leading Pod that failed."""
    reason: Word
    message: Brief = ""
    time: Timestamp


class Recreation(Failure):
    """An instance that failed lately; with each failure in a row its next life waits longer."""

    failures: Annotated[int, Field(ge=1)]
    revision: Word
    pairing: Word | None = None


Conditions = Annotated[list[Condition], Field(max_length=32, json_schema_extra={"x-map-keys": ["type"]})]


class PoolStatus(ApiModel):
    """State of a prefill or decode pool; counts are of instances."""

    observed_generation: Count | None = None
    replicas: Count | None = None
    ready_replicas: Count | None = None
    routable_replicas: Count | None = None
    """Those that schedulers place work on."""
    updated_replicas: Count | None = None
    draining_replicas: Count | None = None
    current_revision: Word | None = None
    update_revision: Word | None = None
    update_started_time: Timestamp | None = None
    """When the newest revision became it."""
    selector: Annotated[str, StringConstraints(max_length=4096)] | None = None
    """Labels of the instances' leading Pods, as `/scale` wants them."""
    instances: (
        Annotated[
            list[InstanceStatus],
            Field(max_length=MAX_INSTANCES_LISTED, json_schema_extra={"x-map-keys": ["name"]}),
        ]
        | None
    ) = None
    last_failures: Annotated[list[Failure], Field(max_length=5)] | None = None
    recreations: (
        Annotated[
            list[Recreation],
            Field(max_length=MAX_RECREATIONS, json_schema_extra={"x-map-keys": ["instance"]}),
        ]
        | None
    ) = None
    conditions: Conditions | None = None


class KVCachePoolStatus(PoolStatus):
    """State of a store."""

    capacity_bytes: Count | None = None
    """DRAM of all mounted segments, as the master says."""
    allocated_bytes: Count | None = None
    capacity: Word | None = None
    """`capacityBytes` for people, e.g. 1.2Ti."""
    used: Word | None = None
    """Share of the capacity that is taken, e.g. 83%."""
    measured_time: Timestamp | None = None
    """When the master was last asked with a new result."""


class PoolSummary(ApiModel):
    """One pool of a cluster in brief."""

    kind: Word
    name: Word
    replicas: Count | None = None
    routable_replicas: Count | None = None


class ClusterStatus(ApiModel):
    """State of a cluster."""

    observed_generation: Count | None = None
    endpoint: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """URL of the OpenAI API."""
    prefill: Word | None = None
    """Routable and wanted prefill instances, e.g. 3/4."""
    decode: Word | None = None
    kv: Word | None = None
    ttft: Word | None = None
    """Of the last 5 minutes at the SLO's percentile, in model time, e.g. 1.2s; left out: no traffic."""
    tbt: Word | None = None
    """As ttft, the time between tokens, e.g. 85ms."""
    measured_time: Timestamp | None = None
    """When ttft and tbt were last found to be different."""
    pools: (
        Annotated[
            list[PoolSummary],
            Field(max_length=MAX_POOLS_LISTED, json_schema_extra={"x-map-keys": ["kind", "name"]}),
        ]
        | None
    ) = None
    recreations: (
        Annotated[
            list[Recreation],
            Field(max_length=MAX_RECREATIONS, json_schema_extra={"x-map-keys": ["instance"]}),
        ]
        | None
    ) = None
    """Of the cluster's own Pods, such as a managed Redis."""
    conditions: Conditions | None = None
