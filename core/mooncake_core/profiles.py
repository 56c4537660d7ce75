"""How fast a class of hardware runs a model: the constants of the cost models, before any is fitted online.

T_prefill(n, p) = a + b·(n − p) + c·(n² − p²) seconds for a prompt of n tokens of which p are cached.
TBT = t0 + t1·batch + t2·kv_tokens seconds a decode step.
"""

from __future__ import annotations

import msgspec

from mooncake_core.shapes import A800, GPUS, LLAMA3_70B, MODELS, Gpu, Model

PIPELINE_CHUNK_TOKENS = 2_048
"""Of a prompt a step, where an instance has stages: short chunks fill them soon. The paper says no number;
shorter ones would no longer keep GPUs busy (FAST'25 §3.3 speaks of more than 1 000)."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one (hardware, model) pair."""

    name: str
    prefill_a_s: float
    prefill_b_s_per_token: float
    prefill_c_s_per_token2: float
    decode_t0_s: float
    decode_t1_s_per_request: float
    decode_t2_s_per_token: float
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    """Tokens of KV that fit in HBM beside the weights."""
    network_bytes_per_s: float
    """What one instance's NICs carry."""
    dram_to_hbm_bytes_per_s: float
    ssd_bytes_per_s: float
    gpus: int = 8
    """GPUs of the instance that the constants were measured on."""
    pods: int = 1
    """Pods that an instance consists of."""
    prefill_stages: int = 1
    """Stages that the chunks of a prompt pass one after the other, each on other Pods."""
    prefill_chunk_tokens: int = PIPELINE_CHUNK_TOKENS
    """Of a prompt a step, where there are stages."""

    def over(self, pods: int, *, tensor: int = 1, pipeline: int = 1) -> Profile:
        """The constants of an instance that consists of several Pods, each as fast as this profile.

        Ideal: nothing is lost between Pods. They share prompts, memory and NICs. Each chunk of a prompt goes
        through all stages (pipeline), which a prompt of a single chunk feels in full (`prefill_stages`). A
        decode step reads the weights with all Pods that a layer is spread over (tensor); it passes through
        stages one after the other, so that these shorten only what grows with the batch: a busy pipeline has
        other requests in its other stages (chunked pipeline parallelism, FAST'25 §3.3).

        Args:
            pods: of the instance; must divide tensor × pipeline.
            tensor: GPUs that share a layer.
            pipeline: stages of layers.
        """
        if pods == 1:
            return self
        gpus_per_pod = tensor * pipeline // pods
        share_a_layer = max(tensor // gpus_per_pod, 1)
        stages = pods // share_a_layer
        return msgspec.structs.replace(
            self,
            name=f"{self.name}, {share_a_layer}x{stages} Pods",
            pods=self.pods * pods,
            gpus=self.gpus * pods,
            prefill_stages=stages,
            prefill_b_s_per_token=self.prefill_b_s_per_token / pods,
            prefill_c_s_per_token2=self.prefill_c_s_per_token2 / pods,
            decode_t0_s=self.decode_t0_s / share_a_layer,
            decode_t1_s_per_request=self.decode_t1_s_per_request / pods,
            decode_t2_s_per_token=self.decode_t2_s_per_token / pods,
            kv_capacity_tokens=self.kv_capacity_tokens * pods,
            network_bytes_per_s=self.network_bytes_per_s * pods,
            dram_to_hbm_bytes_per_s=self.dram_to_hbm_bytes_per_s * pods,
        )


LLAMA3_70B_A800 = Profile(
    name="llama3-70b-8xa800",
    # FAST'25 Fig. 14a: all five points within 1.5 %.
    prefill_a_s=0.0,
    prefill_b_s_per_token=1.1184e-4,
    prefill_c_s_per_token2=7.466e-10,
    # Fits 27 ms at 8k and 31 ms at 128k tokens, ×1.25 at batch 16 (arXiv Fig. 2).
    decode_t0_s=0.0265,
    decode_t1_s_per_request=1.83e-4,
    decode_t2_s_per_token=3.33e-8,
    kv_bytes_per_token=320_000,
    kv_capacity_tokens=1_400_000,
    network_bytes_per_s=100e9,
    # FAST'25 Fig. 14: 128k tokens (40 GB) load from DRAM in about 0.42 s.
    dram_to_hbm_bytes_per_s=95e9,
    ssd_bytes_per_s=12e9,
)


def scaled(model: Model, gpu: Gpu) -> Profile | None:
    """Constants of an instance that nobody measured, from those of LLaMA3-70B on 8 x A800.

    What computes (prefill) and what reads KV is as far from the GPUs' peak as it was measured there. A decode
    step reads the weights and computes for its requests at the peak; what it took there beyond (launches,
    GPUs that wait for each other) is the same for each layer of any model on any GPU: slower than today's
    engines, so that what is planned with it will rather do better. The SSD is the host's.

    Args:
        model: of which an instance has as many GPUs as it says.
        gpu: that it runs on.

    Returns:
        None where the weights leave no room for KV.
    """
    known, gpus = LLAMA3_70B_A800, model.gpus
    flops = gpus * gpu.flops / (known.gpus * A800.flops)
    reading = gpus * gpu.hbm_bytes_per_s / (known.gpus * A800.hbm_bytes_per_s)
    kv = model.kv_numbers_per_token / LLAMA3_70B.kv_numbers_per_token
    kv_bytes_per_token = round(known.kv_bytes_per_token * kv)
    kv_bytes = gpus * gpu.hbm_bytes * _USABLE_SHARE - model.weight_bytes
    if kv_bytes < kv_bytes_per_token:
        return None
    layers = model.layers / LLAMA3_70B.layers
    step_s, request_s = _at_peak_s(model, gpu, gpus)
    known_step_s, known_request_s = _at_peak_s(LLAMA3_70B, A800, known.gpus)
    return Profile(
        name=f"{model.name}-{gpus}x{gpu.name}",
        prefill_a_s=known.prefill_a_s,
        prefill_b_s_per_token=known.prefill_b_s_per_token * model.parameters / LLAMA3_70B.parameters / flops,
        prefill_c_s_per_token2=(
            known.prefill_c_s_per_token2 * model.attention_width / LLAMA3_70B.attention_width / flops
        ),
        decode_t0_s=step_s + layers * (known.decode_t0_s - known_step_s),
        decode_t1_s_per_request=request_s + layers * (known.decode_t1_s_per_request - known_request_s),
        decode_t2_s_per_token=known.decode_t2_s_per_token * kv / reading,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_capacity_tokens=int(kv_bytes / kv_bytes_per_token),
        network_bytes_per_s=gpus * gpu.network_bytes_per_s,
        dram_to_hbm_bytes_per_s=gpus * gpu.dram_bytes_per_s,
        ssd_bytes_per_s=known.ssd_bytes_per_s,
        gpus=gpus,
    )


def _at_peak_s(model: Model, gpu: Gpu, gpus: int) -> tuple[float, float]:
    """Seconds of a decode step that go into reading weights, and of each of its requests into computing."""
    return (
        model.weight_bytes / (gpus * gpu.hbm_bytes_per_s),
        2 * model.parameters / (gpus * gpu.flops),
    )


_USABLE_SHARE = (
    LLAMA3_70B_A800.kv_capacity_tokens * LLAMA3_70B_A800.kv_bytes_per_token + LLAMA3_70B.weight_bytes
) / (LLAMA3_70B_A800.gpus * A800.hbm_bytes)
"""Of HBM, for weights and KV together."""


def _profiles() -> dict[str, Profile]:
    measured = {LLAMA3_70B_A800.name: LLAMA3_70B_A800}
    each = [scaled(model, gpu) for model in MODELS for gpu in GPUS]
    return {one.name: one for one in each if one is not None} | measured


PROFILES: dict[str, Profile] = _profiles()
"""By name, `<model>-<GPUs>x<GPU>`: that of the paper as it was measured, the others scaled from it."""
