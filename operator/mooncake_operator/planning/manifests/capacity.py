"""What an engine can hold, as far as its arguments and profile say."""

from __future__ import annotations

from mooncake_core.api.arguments import hbm_tokens, number_of, text_of
from mooncake_core.api.engine import EngineSpec
from mooncake_core.api.pods import InstanceSpec
from mooncake_core.profiles import PROFILES


def kv_capacity_tokens(engine: EngineSpec, instance: InstanceSpec) -> int:
    """KV tokens that an instance holds in HBM, by arguments or profile; 0 = only the engine knows."""
    told = hbm_tokens(engine.args, engine.block_size)
    if told is not None:
        return told
    if engine.profile is None:
        return 0
    whole = PROFILES[engine.profile].over(
        instance.size, tensor=instance.parallelism.tensor, pipeline=instance.parallelism.pipeline
    )
    return whole.kv_capacity_tokens // engine.block_size * engine.block_size


def max_model_len_tokens(engine: EngineSpec) -> int:
    """Longest prompt with its output; 0 = only the engine knows."""
    return number_of(engine.args, "--max-model-len") or 0


def kv_cache_dtype(engine: EngineSpec) -> str | None:
    """In what form KV is kept; None = as the model computes."""
    return text_of(engine.args, "--kv-cache-dtype")
