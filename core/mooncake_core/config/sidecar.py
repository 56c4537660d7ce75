"""The configuration of the sidecar beside an engine (`sidecar.json`, rendered by the operator)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mooncake_core.config.base import ConfigDocument
from mooncake_core.config.scheduler import ListenConfig
from mooncake_core.registry import EngineKind, Role


class SidecarConfig(ConfigDocument):
    """All that a sidecar is told; what it can ask the engine for (block size, ports), it asks."""

    instance: str
    """Id under which the instance registers: the Pod name."""
    cluster: str
    namespace: str = "default"
    pool: str
    role: Role
    model: str
    revision: str = ""
    engine: EngineKind
    connector: Literal["", "MooncakeConnector", "NixlConnector"] = ""
    engine_url: str
    """How the sidecar reaches the engine (loopback)."""
    advertised_url: str
    """How schedulers reach the engine."""
    bootstrap_url: str = ""
    advertised_admin_url: str = ""
    listen: ListenConfig
    redis_url: str
    redis_password_file: str | None = None
    journal_dir: str
    """emptyDir in which the mirror of the engine's cache survives a restart of the sidecar."""
    events_endpoint: str | None = None
    """ZMQ address of the engine's KV events; None = asked from `/kv_event_sources`."""
    replay_endpoint: str | None = None
    fetch: Literal["none", "store", "peer"] = "none"
    store: str = ""
    store_url: str = ""
    """HTTP base URL of the store's master, to verify what events say of it."""
    store_client: str = ""
    """Module with the store's client (`MooncakeDistributedStore`), by which blocks are brought back from SSD;
    empty = they are not."""
    store_address: str = ""
    """host:port of the master's RPC, for that client."""
    topology_domain: str = ""
    instance_class: str = ""
    pipeline_stages: int = Field(default=1, ge=1)
    block_size_tokens: int = Field(default=0, ge=0)
    """What the engine was started with, for engines that tell no metrics; 0 = asked from it."""
    kv_capacity_tokens: int = Field(default=0, ge=0)
    """0 = read from the engine's `cache_config_info` metric."""
    max_batch: int = Field(default=0, ge=0)
    heartbeat_s: float = Field(default=1.0, gt=0)
    time_scale: float = Field(default=1.0, gt=0)
    drain_timeout_s: float = Field(default=600, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
