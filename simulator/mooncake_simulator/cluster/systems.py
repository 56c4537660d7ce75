"""Other ways to serve with the same instances: what this system is compared with."""

from __future__ import annotations

from mooncake_core.profiles import LLAMA3_70B_A800, Profile
from mooncake_simulator.cluster.cluster import ClusterSpec


def prefill_first(
    instances: int, *, cache_tokens: int = 0, policy: str = "round-robin", profile: Profile = LLAMA3_70B_A800
) -> ClusterSpec:
    """Engines as those of vLLM V0: both in one, and a waiting prompt is computed whole before the next step.

    Args:
        instances: that do both.
        cache_tokens: KV of prefixes that each keeps in HBM; 0 = no prefix caching.
        policy: who spreads the requests; vLLM has no router of its own.
        profile: their speed.
    """
    return ClusterSpec(
        instances, 0, profile=profile, policy=policy, coupled="prefill-first", fetch="none",
        cache_tokens=cache_tokens,
    )  # fmt: skip


def chunked(
    instances: int,
    *,
    chunk_tokens: int = 512,
    cache_tokens: int = 0,
    policy: str = "round-robin",
    profile: Profile = LLAMA3_70B_A800,
) -> ClusterSpec:
    """Sarathi, and vLLM with chunked prefill: each step decodes for all and computes a chunk of one prompt.

    Args:
        instances: that do both.
        chunk_tokens: of a prompt a step.
        cache_tokens: KV of prefixes that each keeps in HBM; 0 = no prefix caching.
        policy: who spreads the requests.
        profile: their speed.
    """
    return ClusterSpec(
        instances, 0, profile=profile, policy=policy, coupled="chunked", fetch="none",
        cache_tokens=cache_tokens, chunk_tokens=chunk_tokens,
    )  # fmt: skip


def distserve(
    prefill: int,
    decode: int,
    *,
    join_load_bytes_per_s: float = 0.0,
    profile: Profile = LLAMA3_70B_A800,
) -> ClusterSpec:
    """DistServe (OSDI'24): prefill and decode apart, and nothing of a prompt is kept: no pool, no caches.

    Requests go to the shortest queue for prefill, and to the decode instance with the least to do.

    Args:
        prefill: instances for prefill.
        decode: instances for decode.
        join_load_bytes_per_s: as in `ClusterSpec`.
        profile: their speed.
    """
    return ClusterSpec(
        prefill, decode, profile=profile, policy="load-balance", fetch="none", cache_tokens=0,
        join_load_bytes_per_s=join_load_bytes_per_s,
    )  # fmt: skip
