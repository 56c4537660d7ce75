"""The scheduler of a cluster: how requests are routed and admitted, and what schedulers share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mooncake_core.api.base import ApiModel, Rule, Write
from mooncake_core.api.metadata import Reference
from mooncake_core.api.pods import RedisPodTemplate, SchedulerPodTemplate
from mooncake_core.api.scalars import ObjectName, Ratio


class ManagedRedis(ApiModel):
    """A Redis that the operator runs; it needs no disk, engines' sidecars refill it."""

    pod_template: RedisPodTemplate | None = None
    """Merged into its Pod (container `redis`); a change makes a new Redis, and no new engine."""


class RedisSpec(ApiModel):
    """Where schedulers share the prefix index, the ledger and the registry."""

    # Atomic: else the server-side apply of `managed: {}` after one with a template is refused as null.
    managed: Annotated[ManagedRedis, Field(json_schema_extra={"x-kubernetes-map-type": "atomic"})] | None = (
        None
    )
    secret_ref: Reference | None = None
    """A Secret whose key `url` is redis://[:password@]host:port/db."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda r: (r.managed is None) != (r.secret_ref is None),
            "has(self.managed) != has(self.secretRef)",
            "needs either managed or secretRef; write managed: {}, or secretRef: {name: redis}",
        ),
    )


class Routing(ApiModel):
    """How an instance is chosen."""

    policy: Literal[
        "kv-centric",
        "algorithm-1",
        "cache-aware",
        "load-balance",
        "random",
        "round-robin",
        "dynamo",
        "vllm-kv-aware",
        "sglang-cache-aware",
        "llm-d-weighted",
    ] = "kv-centric"
    balancing_threshold: Annotated[Ratio, Write('a number of at least 1 as text, e.g. "1.5"')] = "1.5"
    """Algorithm 1: from which ratio of best to local prefix length on a prefix is fetched."""
    disaggregation_threshold_tokens: Annotated[
        int, Field(ge=0, le=1_000_000), Write("a number of tokens, e.g. 512; 0 = always in two places")
    ] = 0
    """A decode instance that holds the prefix computes a rest of at most so many tokens itself."""
    queue_order: Literal["shortest-first", "first-come"] = "shortest-first"
    """With kv-centric: who goes next where several wait for a prefill instance. Promised TTFTs are kept."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), Write("a whole number, e.g. 1")] | None = None
    """Of the chance between equals, for runs to be repeated; left out: another one each time."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda r: float(r.balancing_threshold) >= 1,
            "double(self.balancingThreshold) >= 1.0",
            'must be at least 1; write e.g. "1.5"',
            at="balancingThreshold",
        ),
    )


class Admission(ApiModel):
    """How overload is refused."""

    mode: Literal["none", "early", "predictive"] = "predictive"
    priority_floor: Annotated[int, Field(ge=-1000, le=1000), Write("a whole number, e.g. 0")] = 0
    """Requests below this priority are refused first."""


class SecretKeyReference(ApiModel):
    """A key of a Secret of the same namespace."""

    name: ObjectName
    key: ObjectName = "keys.json"


class Auth(ApiModel):
    """Who may ask."""

    api_key_secret_ref: SecretKeyReference | None = None
    """JSON object of key name → key; the name is the tenant."""


class SchedulerSpec(ApiModel):
    """The Conductor's processes."""

    replicas: Annotated[int, Field(ge=1, le=16), Write("a number of schedulers, e.g. 2")] = 1
    redis: RedisSpec | None = None
    """Left out: index and ledger live in the one scheduler's memory."""
    routing: Routing = Field(default_factory=Routing)
    admission: Admission = Field(default_factory=Admission)
    auth: Auth = Field(default_factory=Auth)
    pod_template: SchedulerPodTemplate | None = None
    """Merged into the schedulers' Pods (container `scheduler`); a change replaces them, and no engine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: s.redis is not None or s.replicas == 1,
            "has(self.redis) || self.replicas == 1",
            "several schedulers need to share a Redis; write redis: {managed: {}}, or replicas: 1",
            at="replicas",
        ),
    )
