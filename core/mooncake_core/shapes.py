"""What GPUs can do and what models consist of, as their makers publish it.

Data only: `mooncake_core.profiles` makes seconds of it. Dense models in BF16: how many weights a step of a
mixture of experts reads depends on its batch, which the cost models do not know.
"""

from __future__ import annotations

import msgspec

_BYTES_PER_NUMBER = 2
"""BF16, weights and KV alike."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a server with eight, with its share of what the server's boards carry."""

    name: str
    flops: float
    """Peak of dense BF16 tensor operations a second."""
    hbm_bytes: float
    hbm_bytes_per_s: float
    network_bytes_per_s: float
    """Of its NIC."""
    dram_bytes_per_s: float
    """From the host's memory into HBM."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A dense transformer, as its `config.json` says."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gpus: int
    """That an instance of it usually has."""

    @property
    def weight_bytes(self) -> float:
        """What each decode step reads."""
        return self.parameters * _BYTES_PER_NUMBER

    @property
    def kv_numbers_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_width(self) -> int:
        """What a pair of tokens costs in attention, in all layers, grows with it."""
        return self.layers * self.heads * self.head_dim


# Makers' data sheets. NICs and the way from DRAM are those of the paper's servers (8 x 100 Gb/s, PCIe 4);
# Hopper's have 190 GB/s over 8 x 400 Gb/s (FAST'25 Fig. 12), and PCIe 5, twice as fast.
A800 = Gpu(
    name="a800",
    flops=312e12,
    hbm_bytes=80e9,
    hbm_bytes_per_s=2.039e12,
    network_bytes_per_s=100e9 / 8,
    dram_bytes_per_s=95e9 / 8,
)
H800 = Gpu(
    name="h800",
    flops=989e12,
    hbm_bytes=80e9,
    hbm_bytes_per_s=3.35e12,
    network_bytes_per_s=190e9 / 8,
    dram_bytes_per_s=190e9 / 8,
)
H200 = Gpu(
    name="h200",
    flops=989e12,
    hbm_bytes=141e9,
    hbm_bytes_per_s=4.8e12,
    network_bytes_per_s=190e9 / 8,
    dram_bytes_per_s=190e9 / 8,
)
GPUS = (A800, H800, H200)

LLAMA3_70B = Model(
    name="llama3-70b", parameters=70.6e9, layers=80, heads=64, kv_heads=8, head_dim=128, gpus=8
)
MODELS = (
    LLAMA3_70B,
    Model(name="llama3-8b", parameters=8.03e9, layers=32, heads=32, kv_heads=8, head_dim=128, gpus=1),
    Model(name="llama3.1-405b", parameters=405.9e9, layers=126, heads=128, kv_heads=8, head_dim=128, gpus=8),
    Model(name="qwen2.5-72b", parameters=72.7e9, layers=80, heads=64, kv_heads=8, head_dim=128, gpus=8),
    Model(name="qwen3-32b", parameters=32.8e9, layers=64, heads=64, kv_heads=8, head_dim=128, gpus=4),
)
