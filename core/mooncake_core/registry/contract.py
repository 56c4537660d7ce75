"""The registry contract: instances announce themselves under an epoch and keep it alive by heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Protocol

import msgspec


class Role(StrEnum):
    """What an instance does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    STORE = "store"


class EngineKind(StrEnum):
    """The software an instance runs; decides how its hand-over is spoken."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    SIMULATED = "Simulated"
    STORE = "MooncakeStore"


class InstanceState(StrEnum):
    """Whether new work may be placed on an instance."""

    READY = "ready"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


class StaleEpochError(Exception):
    """The caller speaks for an epoch that a newer registration has replaced; it registers again or ends."""


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine replica, or one KV cache pool (role `store`), as it announced itself.

    `id` is the Pod name of its leader. `epoch` is 0 until the registry has given one; it grows with every
    registration and with every cache clear, so that residency of an earlier life is forgotten at once.
    """

    id: str
    role: Role
    url: str
    """Base URL of its OpenAI server (for a store: of the master's HTTP endpoint), no trailing slash."""
    epoch: int = 0
    cluster: str = ""
    pool: str = ""
    model: str = ""
    revision: str = ""
    """Controller revision: prefill and decode are paired only inside one revision."""
    engine: EngineKind = EngineKind.VLLM
    engine_version: str = ""
    connector: Literal["", "MooncakeConnector", "NixlConnector"] = ""
    bootstrap_url: str = ""
    """Mooncake connector only: where `GET /query` tells the prefill's engine_id per data-parallel rank."""
    block_size_tokens: int = 16
    kv_capacity_tokens: int = 0
    """KV tokens that fit in HBM; 0 = unknown, then memory is never a reason to refuse."""
    max_model_len_tokens: int = 0
    max_batch: int = 0
    """Most requests in one batch; 0 = unknown."""
    fetch: Literal["none", "store", "peer"] = "none"
    """From where this instance can pull a prefix that it does not hold (conductor.md: transfer branch)."""
    store: str = ""
    """Id of the KV cache pool that it reads and writes, when `fetch` is `store`."""
    topology_domain: str = ""
    instance_class: str = ""
    """Instances of one class share one fitted cost model; empty = the pool."""
    pipeline_stages: int = 1
    state: InstanceState = InstanceState.READY
    admin_url: str = ""
    """Where its sidecar answers (drain, health); empty without a sidecar."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself, taken from its metrics by the sidecar; corrects the ledger."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0..1."""
    at_s: float = 0.0
    """When it was read, in seconds of the shared clock."""


class Registry(Protocol):
    """Who is there. Every method may raise ConnectionError when the shared state is away."""

    async def register(self, instance: Instance, *, resume_epoch: int = 0) -> Instance:
        """Announce an instance; returns it with its new epoch. The same id replaces its earlier life.

        Args:
            instance: The record; its own `epoch` is a floor, so that epochs grow even where the registry has
                lost its memory.
            resume_epoch: The epoch of a life that has not ended, though it may have gone unheard for a while:
                it is kept if no other has begun since.
        """

    async def join(self, instance: Instance) -> Instance:
        """Announce an instance for which several speak, such as a pool: a live record stays as it is."""

    async def heartbeat(
        self, instance_id: str, epoch: int, report: EngineReport | None = None
    ) -> InstanceState:
        """Keep a registration alive; returns the wanted state (a drain mark reaches the sidecar this way).

        Raises:
            StaleEpochError: the registration was replaced, or expired and was reaped.
        """

    async def deregister(self, instance_id: str, epoch: int) -> None:
        """Leave. Stale epochs are ignored: a late goodbye must not remove the successor."""

    async def mark(self, instance_id: str, state: InstanceState) -> bool:
        """Mark an instance draining or ready again; False when it is unknown."""

    async def instances(self) -> Sequence[Instance]:
        """All live instances, by id; not those whose heartbeat is older than the registry's limit."""

    async def reports(self) -> dict[str, EngineReport]:
        """The last report of each live instance that sent one."""
