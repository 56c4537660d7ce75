"""What an engine can hold, as far as its arguments and profile say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mooncake_core.api.engine import EngineSpec
from mooncake_core.api.pods import InstanceSpec
from mooncake_core.profiles import PROFILES

_SIMULATED_MAX_BATCH = 256
"""vLLM's `--max-num-seqs` where it is not given, which the simulated engine keeps."""


def kv_capacity_tokens(engine: EngineSpec, instance: InstanceSpec) -> int:
    """KV tokens that an instance holds in HBM, by arguments or profile; 0 = only the engine knows."""
    if blocks := _number(engine.args, "--num-gpu-blocks-override"):
        # One block is vLLM's null block, which holds nothing.
        return max(blocks - 1, 0) * engine.block_size
    if engine.profile is None:
        return 0
    whole = PROFILES[engine.profile].over(
        instance.size, tensor=instance.parallelism.tensor, pipeline=instance.parallelism.pipeline
    )
    return whole.kv_capacity_tokens // engine.block_size * engine.block_size


def max_batch(engine: EngineSpec) -> int:
    """Most requests in one batch; 0 = only the engine knows."""
    given = _number(engine.args, "--max-num-seqs")
    if given is not None:
        return given
    return _SIMULATED_MAX_BATCH if engine.type == "Simulated" else 0


def max_model_len_tokens(engine: EngineSpec) -> int:
    """Longest prompt with its output; 0 = only the engine knows."""
    return _number(engine.args, "--max-model-len") or 0


def kv_cache_dtype(engine: EngineSpec) -> str | None:
    """In what form KV is kept; None = as the model computes."""
    return _text(engine.args, "--kv-cache-dtype")


def _number(arguments: Sequence[str], flag: str) -> int | None:
    """Value of a flag; None when it is absent or not a plain number."""
    value = _text(arguments, flag)
    return int(value) if value is not None and re.fullmatch(r"[0-9]+", value) else None


def _text(arguments: Sequence[str], flag: str) -> str | None:
    """Value of a flag written as `--flag=5` or `--flag 5`; the last one counts."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = text if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return value
