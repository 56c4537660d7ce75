"""Bytes of KV a token, from config.json as models publish it; the numbers are those of the model cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.config import ListenConfig, SchedulerConfig
from mooncake_scheduler.assembly import build_scheduler
from mooncake_scheduler.model_config import kv_bytes_per_token

LLAMA3_70B = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def size(folder: Path, config: dict[str, Any] | str, dtype: str | None = None) -> int | None:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return kv_bytes_per_token(folder, dtype)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        pytest.param(LLAMA3_70B, None, 80 * 2 * 8 * 128 * 2, id="grouped queries"),
        pytest.param(LLAMA3_70B, "auto", 327_680, id="auto is the model's own"),
        pytest.param(LLAMA3_70B, "fp8_e4m3", 163_840, id="kept in 8 bits"),
        pytest.param(DEEPSEEK_V3, None, 61 * 576 * 2, id="latent attention"),
        pytest.param({"text_config": LLAMA3_70B, "vision_config": {}}, None, 327_680, id="a model that sees"),
        pytest.param(LLAMA3_70B | {"head_dim": 64, "dtype": "float32"}, None, 327_680, id="own head size"),
        pytest.param(
            {k: v for k, v in LLAMA3_70B.items() if k != "num_key_value_heads"}, None, 8 * 327_680,
            id="a key for each query",
        ),
        pytest.param(
            LLAMA3_70B | {"layer_types": ["sliding_attention", "full_attention"] * 40}, None, 163_840,
            id="windows hold no more for a longer prompt",
        ),
    ],
)  # fmt: skip
def test_a_config_says_what_a_token_takes(
    tmp_path: Path, config: dict[str, Any], dtype: str | None, expected: int
) -> None:
    assert size(tmp_path, config, dtype) == expected


@pytest.mark.parametrize(
    "config",
    ["", "[]", "{}", '{"num_hidden_layers": "many"}', json.dumps(LLAMA3_70B | {"dtype": "?"})],
)
def test_a_config_that_is_not_understood_says_nothing(tmp_path: Path, config: str) -> None:
    assert size(tmp_path, config) is None


def test_without_a_config_nothing_is_known(tmp_path: Path) -> None:
    assert kv_bytes_per_token(tmp_path) is None


def test_a_scheduler_without_a_profile_begins_with_what_the_model_folder_says(tmp_path: Path) -> None:
    from mooncake_testing.toy_model import write_toy_model

    folder = write_toy_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(LLAMA3_70B))
    (tmp_path / "instances.json").write_text("[]")
    listen = ListenConfig(host="127.0.0.1", port=1)
    config = SchedulerConfig(
        cluster="c", model="m", model_path=str(folder), serving=listen, admin=listen,
        instances_file=str(tmp_path / "instances.json"), kv_cache_dtype="fp8",
    )  # fmt: skip
    model = build_scheduler(config).services.placer.conductor.costs.of_class("any")
    assert model.kv_bytes_per_token == 163_840
    assert not model.knows_prefill
