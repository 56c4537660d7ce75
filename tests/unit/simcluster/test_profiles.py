"""Speeds that nobody measured, against the one that was and against what GPUs can do."""

from __future__ import annotations

from math import inf

import pytest

from mooncake_core.profiles import LLAMA3_70B_A800, PROFILES, Profile, scaled
from mooncake_core.shapes import A800, GPUS, H200, H800, LLAMA3_70B, MODELS, Gpu, Model
from mooncake_scheduler.conductor.cost import CostModel

PAIRS = [(model, gpu) for model in MODELS for gpu in GPUS if scaled(model, gpu)]


def profile(model: Model, gpu: Gpu) -> Profile:
    found = scaled(model, gpu)
    assert found is not None
    return found


def test_what_was_measured_is_where_scaling_starts_and_is_offered_as_it_was_measured() -> None:
    again, measured = profile(LLAMA3_70B, A800), LLAMA3_70B_A800
    for field in Profile.__struct_fields__:
        told, wanted = getattr(again, field), getattr(measured, field)
        assert told == (wanted if isinstance(wanted, str) else pytest.approx(wanted)), field
    assert PROFILES[measured.name] is measured


@pytest.mark.parametrize(("gpu", "paper_gb_s"), [(A800, 6), (H800, 19)])
def test_peaks_and_shape_give_the_bandwidth_from_which_the_paper_says_reuse_pays(
    gpu: Gpu, paper_gb_s: int
) -> None:
    # FAST'25 Eq. 2 at 8 192 tokens, of LLaMA3-70B on eight GPUs: d 8 192, a 4, b 22, s 2 bytes.
    width, groups = LLAMA3_70B.heads * LLAMA3_70B.head_dim, LLAMA3_70B.heads // LLAMA3_70B.kv_heads
    wanted = 2 * width * 2 * 8 * gpu.flops / (groups * (4 * 8_192 * width + 22 * width**2))
    assert round(wanted / 1e9) == paper_gb_s


@pytest.mark.parametrize(("model", "gpu"), PAIRS, ids=lambda each: each.name)
def test_no_instance_is_faster_than_its_gpus(model: Model, gpu: Gpu) -> None:
    instance, cost = profile(model, gpu), CostModel.from_profile(profile(model, gpu))
    tokens, batch = 32_768, 8
    flops = 2 * model.parameters * tokens + 2 * model.attention_width * tokens**2
    assert cost.prefill_s(tokens, 0) >= flops / (instance.gpus * gpu.flops)
    read_bytes = model.weight_bytes + batch * tokens * instance.kv_bytes_per_token
    assert cost.step_s(batch, batch * tokens) >= read_bytes / (instance.gpus * gpu.hbm_bytes_per_s)
    held_bytes = model.weight_bytes + instance.kv_capacity_tokens * instance.kv_bytes_per_token
    assert held_bytes <= instance.gpus * gpu.hbm_bytes
    # The paper says 320 KB of KV a token where the shape has 320 KiB.
    assert instance.kv_bytes_per_token == pytest.approx(2 * model.kv_numbers_per_token, rel=0.025)


def test_newer_gpus_are_no_slower_and_hold_no_less() -> None:
    for model in MODELS:
        fastest_s, most = (inf, inf, inf), 0
        for gpu in GPUS:
            if (found := scaled(model, gpu)) is None:
                continue
            cost = CostModel.from_profile(found)
            seconds = cost.prefill_s(8_192, 0), cost.step_s(1, 8_192), cost.step_s(64, 500_000)
            assert all(mine <= before for mine, before in zip(seconds, fastest_s, strict=True)), found.name
            assert found.kv_capacity_tokens >= most
            fastest_s, most = seconds, found.kv_capacity_tokens


def test_a_model_whose_weights_do_not_fit_is_not_offered() -> None:
    largest = max(MODELS, key=lambda model: model.parameters)
    assert scaled(largest, A800) is None
    assert profile(largest, H200).name in PROFILES
    assert not any(name.startswith(largest.name) and "a800" in name for name in PROFILES)
