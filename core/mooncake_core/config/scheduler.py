"""The scheduler's configuration, rendered by the operator into a ConfigMap (`scheduler.json`)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from mooncake_core.config.base import ConfigDocument

FIRST_TOKEN_TIMEOUT_S = 60.0
"""Wall seconds for which a decode may be waited for after the hand-over; staged KV is of no use beyond."""


class AdmissionMode(StrEnum):
    """When overload is refused (conductor.md, Admission)."""

    NONE = "none"
    EARLY = "early"
    PREDICTIVE = "predictive"


class ListenConfig(ConfigDocument):
    """A socket to listen on."""

    host: str = "0.0.0.0"
    port: int = Field(ge=1, le=65535)


class SloConfig(ConfigDocument):
    """Targets in seconds, or multiples of an idle request; both absent = no target."""

    ttft_s: float | None = Field(default=None, gt=0)
    ttft_multiplier: float | None = Field(default=None, gt=1)
    ttft_percentile: int = Field(default=90, ge=1, le=100)
    tbt_s: float | None = Field(default=None, gt=0)
    tbt_multiplier: float | None = Field(default=None, gt=1)
    tbt_percentile: int = Field(default=90, ge=1, le=100)


class RoutingConfig(ConfigDocument):
    """Which policy places requests, and its numbers."""

    policy: str = "kv-centric"
    balancing_threshold: float = Field(default=1.5, ge=1)
    disaggregation_threshold_tokens: int = Field(default=0, ge=0)
    """Conditional disaggregation: a decode instance prefills a rest of at most so many tokens itself."""
    queue_order: Literal["shortest-first", "first-come"] = "shortest-first"
    """Of prefills that wait for an instance, where the policy knows an order (kv-centric)."""
    seed: int | None = None
    """Seed of the ties' chance; None = from the operating system."""


class AdmissionConfig(ConfigDocument):
    """How overload is refused."""

    mode: AdmissionMode = AdmissionMode.PREDICTIVE
    priority_floor: int = 0
    headroom: float = Field(default=0.95, gt=0, le=1)
    """Share of the TBT target and of HBM that admission fills; the rest is room for KV growth. Of HBM those
    who wait for a place to decode leave only 0.4 of that rest free."""


class AuthConfig(ConfigDocument):
    """Bearer keys. Files, not values: they come from mounted Secrets and are read again when they change."""

    api_keys_file: str | None = None
    """JSON object {name: key} or {name: {"key": …, "priority": …, "weight": …}}; the name is the tenant."""
    admin_token_file: str | None = None


class StoppingConfig(ConfigDocument):
    """How a scheduler ends once it is asked to. Wall seconds; their sum must fit into the Pod's grace."""

    announced_s: float = Field(default=0, ge=0)
    """How long it still accepts connections, each for one request: whoever leads clients here (a Service's
    endpoints, a load balancer) learns only meanwhile that it ends."""
    streams_s: float = Field(default=30, gt=0)
    """How long after that streams may go on; what is left then is broken off."""


class InstanceShape(ConfigDocument):
    """How the model is spread over the Pods of one instance, and over their GPUs."""

    pods: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)


class SchedulerConfig(ConfigDocument):
    """All that a scheduler process is told."""

    cluster: str
    model: str
    model_path: str | None = None
    """Folder with tokenizer.json and chat template; None = the engines' `/tokenize` is asked."""
    serving: ListenConfig
    admin: ListenConfig
    redis_url: str | None = None
    """`redis://[:password@]host:port/db`; None = index, ledger and registry in memory, one scheduler."""
    redis_password_file: str | None = None
    namespace: str = "default"
    """Prefix of all shared keys, so that clusters can share one Redis."""
    instances_file: str | None = None
    """Without Redis: a JSON list of instances (`core.registry.Instance`), read again when it changes."""
    profile: str | None = None
    """Name of the profile whose constants the cost models start from; None = cold, learned online."""
    shapes: dict[str, InstanceShape] = Field(default_factory=dict)
    """By pool, where instances have several Pods: each Pod has the profile's speed."""
    kv_cache_dtype: str | None = None
    """In what form engines keep KV (vLLM's `--kv-cache-dtype`); None = as the model computes. With the model
    folder it says how many bytes a token takes, where no profile does."""
    time_scale: float = Field(default=1.0, gt=0)
    """Model seconds per wall second: 1 with real engines. All targets, predictions and metrics are in model
    seconds; timeouts and Retry-After are in wall seconds."""
    promoted_store: str = ""
    """Id of the store whose blocks are brought from SSD to DRAM before their conversation's next turn; empty
    = of none. Needs Redis."""
    slo: SloConfig = SloConfig()
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    auth: AuthConfig = AuthConfig()
    stopping: StoppingConfig = StoppingConfig()
    default_output_tokens: int = Field(default=256, ge=1)
    """Predicted output of a request before anything was learned."""
    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    request_timeout_s: float = Field(default=900, gt=0)
    """Wall seconds until a request is answered, or its stream begins: then `stall_timeout_s` counts."""
    tokenise_timeout_s: float = Field(default=20, gt=0)
    """Wall seconds from the request's last byte to its prompt's tokens. Above the 10 s after which an engine
    that does not answer `/tokenize` is given up and the prompt is placed by its size."""
    place_timeout_s: float = Field(default=10, gt=0)
    """Wall seconds from the tokens to a reservation: index, decision, ledger."""
    dispatch_timeout_s: float = Field(default=10, gt=0)
    """Wall seconds from the reservation until the first engine is sent the request."""
    prefill_timeout_s: float = Field(default=300, gt=0)
    first_token_timeout_s: float = Field(default=FIRST_TOKEN_TIMEOUT_S, gt=0)
    """Wall seconds from hand-over to the first token of decode."""
    stall_timeout_s: float = Field(default=60, gt=0)
    """Wall seconds between two chunks of a stream."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
