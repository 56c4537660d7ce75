"""What a sidecar registers its engine as: the configuration, and what the engine said of itself."""

from __future__ import annotations

from mooncake_core.config import SidecarConfig
from mooncake_core.registry import Instance, InstanceState
from mooncake_sidecar.engine.engine_probe import EventSource, Facts

_DEFAULT_BLOCK_SIZE_TOKENS = 16
"""vLLM's, where nobody says."""


def instance_record(config: SidecarConfig, facts: Facts, state: InstanceState, last_epoch: int) -> Instance:
    """The registration. What the configuration says wins, but the engine knows its block size."""
    block_size = facts.block_size_tokens or config.block_size_tokens or _DEFAULT_BLOCK_SIZE_TOKENS
    return Instance(
        id=config.instance,
        role=config.role,
        url=config.advertised_url,
        epoch=last_epoch,
        cluster=config.cluster,
        pool=config.pool,
        model=config.model,
        revision=config.revision,
        engine=config.engine,
        engine_version=facts.version,
        connector=config.connector,
        bootstrap_url=config.bootstrap_url,
        block_size_tokens=block_size,
        kv_capacity_tokens=config.kv_capacity_tokens or facts.kv_blocks * block_size,
        max_model_len_tokens=facts.max_model_len_tokens,
        max_batch=config.max_batch,
        fetch=config.fetch,
        store=config.store,
        topology_domain=config.topology_domain,
        instance_class=config.instance_class,
        pipeline_stages=config.pipeline_stages,
        state=state,
        admin_url=config.advertised_admin_url,
    )


def event_source(config: SidecarConfig, facts: Facts) -> EventSource | None:
    """Where the events come from; None = the engine publishes none."""
    if config.events_endpoint is not None:
        return EventSource(config.events_endpoint, config.replay_endpoint)
    return facts.events
