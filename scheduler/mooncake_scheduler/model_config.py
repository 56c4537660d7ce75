"""What a model folder says of the size of its KV (Hugging Face's `config.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def kv_bytes_per_token(folder: Path, cache_dtype: str | None = None) -> int | None:
    """Bytes of KV that one more token of context takes in all layers together.

    Layers with a sliding window or a recurrent state hold no more for a longer context and do not count.

    Args:
        folder: the model's.
        cache_dtype: vLLM's `--kv-cache-dtype`; None or `auto` = the model's own.

    Returns:
        The bytes; None where the folder does not say, or says it in a way that is not understood.
    """
    try:
        document = json.loads((folder / "config.json").read_text())
        # Of models that also see or hear, the part that writes.
        config = document.get("text_config") or document
        element = _element_bytes(config.get("dtype") or config.get("torch_dtype"), cache_dtype)
        width = _width(config)
        return None if element is None else _layers(config) * width * element
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _layers(config: dict[str, Any]) -> int:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:
        return kinds.count("full_attention")
    return int(config["num_hidden_layers"])


def _width(config: dict[str, Any]) -> int:
    """Numbers that a layer keeps of a token."""
    if config.get("kv_lora_rank"):
        # Latent attention: one compressed vector and one rotary key for all heads (DeepSeek-V2 §2.1).
        return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    heads = int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
    return 2 * int(config.get("num_key_value_heads") or heads) * int(head_dim)


def _element_bytes(dtype: object, cache_dtype: str | None) -> int | None:
    if cache_dtype not in (None, "auto"):
        return 1 if str(cache_dtype).startswith("fp8") else _BYTES.get(str(cache_dtype))
    return _BYTES.get(str(dtype).removeprefix("torch."))
