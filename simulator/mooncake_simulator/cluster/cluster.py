"""What a simulated cluster consists of."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.profiles import LLAMA3_70B_A800, Profile
from mooncake_simulator.cluster.tiers import StoreTiers
from mooncake_simulator.workloads.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster of prefill and decode instances of one profile, and how it is driven."""

    prefill: int
    decode: int
    profile: Profile = LLAMA3_70B_A800
    policy: str = "kv-centric"
    balancing_threshold: float = 1.5
    admission: AdmissionMode = AdmissionMode.NONE
    ttft_target_s: float | None = None
    tbt_target_s: float | None = None
    fetch: Literal["none", "peer", "store"] = "peer"
    """From where a prefill instance gets blocks that it lacks."""
    cache_tokens: int | None = 3_000_000
    """KV that one prefill instance keeps; None = without end."""
    store_tokens: int | None = None
    """KV that the shared store keeps, with `fetch` store; None = without end."""
    load_age_s: float = 0.0
    """How old the loads are that placing goes by; above 0 nothing is checked again on reserving."""
    tiers: StoreTiers | None = None
    """How the store's KV is spread over DRAM and SSD; None = all of it comes at the network's speed."""
    coupled: Literal["prefill-first", "chunked"] | None = None
    """Engines that do both: `prefill` of them, and `decode` is 0 (vLLM V0; Sarathi)."""
    chunk_tokens: int = 2_048
    """Of a prompt a step, where `coupled` is chunked."""
    join_load_bytes_per_s: float = 0.0
    """Rate at which a request's KV enters a running decode batch while the others wait; 0 = nobody waits."""

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < (0 if self.coupled else 1):
            raise ValueError(
                f"{self.prefill} prefill and {self.decode} decode instances serve nobody: give one of each"
            )
        if not 0 <= self.load_age_s < inf:
            raise ValueError(f"load_age_s is a number of seconds, 0 or more, not {self.load_age_s}")
        if self.tiers is not None and self.fetch != "store":
            raise ValueError("tiers are those of a shared store: they need `fetch` store")
        if self.coupled and (self.decode or self.fetch != "none"):
            raise ValueError("coupled engines are counted by `prefill` alone and fetch from nowhere")

    @property
    def cache_blocks(self) -> int | None:
        """Blocks that one prefill instance keeps."""
        return None if self.cache_tokens is None else self.cache_tokens // BLOCK_TOKENS

    @property
    def store_blocks(self) -> int | None:
        """Blocks that the store keeps."""
        return None if self.store_tokens is None else self.store_tokens // BLOCK_TOKENS
