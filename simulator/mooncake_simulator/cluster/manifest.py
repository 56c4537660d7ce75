"""A manifest as a cluster to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from mooncake_core.api.arguments import hbm_tokens
from mooncake_core.api.cluster import MooncakeCluster
from mooncake_core.api.kvcache import KVCachePool
from mooncake_core.api.pools import EnginePool
from mooncake_core.api.scalars import duration_s, quantity
from mooncake_core.api.slo import SloTarget
from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.profiles import LLAMA3_70B_A800, PROFILES, Profile
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.tiers import StoreTiers


class NotSimulatedError(ValueError):
    """The manifest asks for something that the simulation does not know; the message names the field."""


def profile_of(cluster: MooncakeCluster, name: str | None = None) -> Profile:
    """How fast one Pod of the cluster's instances is.

    Args:
        cluster: that of a manifest.
        name: of the profile to take; left out, that of `engine.simulated.profile`, and the one of the paper
            for real engines, whose speed no manifest tells.
    """
    told = name or cluster.spec.engine.profile
    return LLAMA3_70B_A800 if told is None else PROFILES[told]


def spec_of(cluster: MooncakeCluster, profile_name: str | None = None) -> ClusterSpec:
    """What a manifest declares, as far as it decides how requests fare.

    Prefill and decode instances run at the speed of `profile_of`, of an instance of several Pods each one.
    With a KV cache pool, instances keep no more than fits beside the weights and fetch the rest from the
    store, whose SSD is slower than its DRAM; without one, each counts on itself alone. Of engines' arguments
    those are heeded that tell how much KV it holds and how many requests it decodes at once.

    Raises:
        NotSimulatedError: there is nothing to simulate, or a target that depends on the request.
    """
    spec = cluster.spec
    prefill, decode = spec.instances
    if not prefill or not decode:
        raise NotSimulatedError(
            f"{cluster.metadata.name}: nothing to simulate: write at least one replica into "
            "spec.prefillPools and one into spec.decodePools"
        )
    profile = profile_of(cluster, profile_name)
    told = hbm_tokens(spec.engine.args, spec.engine.block_size)
    if told is not None:
        profile = msgspec.structs.replace(profile, kv_capacity_tokens=told)
    steers = spec.scheduler.redis is not None
    return ClusterSpec(
        prefill=prefill,
        decode=decode,
        profile=profile,
        prefill_profiles=_profiles(spec.prefill_pools, profile, told),
        decode_profiles=_profiles(spec.decode_pools, profile, told),
        policy=spec.scheduler.routing.policy,
        balancing_threshold=float(spec.scheduler.routing.balancing_threshold),
        shortest_first=spec.scheduler.routing.queue_order == "shortest-first",
        admission=AdmissionMode(spec.scheduler.admission.mode),
        ttft_target_s=_seconds(spec.slo.ttft, "ttft"),
        tbt_target_s=_seconds(spec.slo.tbt, "tbt"),
        fetch="store" if spec.kv_cache_pools else "none",
        cache_tokens=profile.kv_capacity_tokens,
        store_tokens=_store_tokens(spec.kv_cache_pools, profile),
        max_batch=spec.engine.max_batch,
        tiers=_tiers(spec.kv_cache_pools, profile, steers=steers),
    )


def _store_tokens(pools: Sequence[KVCachePool], profile: Profile) -> int | None:
    """KV that fits into the store, whichever tier."""
    if not pools:
        return None
    held = [
        pool.replicas * max(quantity(pool.segment_size), quantity(pool.ssd.size) if pool.ssd else 0)
        for pool in pools
    ]
    return int(sum(held) / profile.kv_bytes_per_token)


def _tiers(pools: Sequence[KVCachePool], profile: Profile, *, steers: bool) -> StoreTiers | None:
    """DRAM and SSD, where there is an SSD; what stays in DRAM as the store decides it, steered or not."""
    if not any(pool.ssd for pool in pools):
        return None
    dram_bytes = sum(pool.replicas * quantity(pool.segment_size) for pool in pools)
    return StoreTiers(
        dram_tokens=int(dram_bytes / profile.kv_bytes_per_token),
        nodes=sum(pool.replicas for pool in pools),
        rule="steered" if steers and any(p.ssd and p.ssd.promotion == "Predicted" for p in pools) else "lru",
    )


def with_prefill(spec: ClusterSpec, prefill: int) -> ClusterSpec:
    """The same number of instances in all, with another number of them for prefill."""
    if spec.prefill_profiles or spec.decode_profiles:
        raise NotSimulatedError(
            "a sweep gives instances of one side to the other, which those of several Pods cannot be given: "
            "write instance.size 1, or replicas by hand"
        )
    total = spec.prefill + spec.decode
    if not 0 < prefill < total:
        raise NotSimulatedError(
            f"{prefill} of {total} instances for prefill leaves none for one side: "
            f"sweep from 1 to {total - 1} at most"
        )
    return replace(spec, prefill=prefill, decode=total - prefill)


def _profiles(pools: Sequence[EnginePool], profile: Profile, told_tokens: int | None) -> tuple[Profile, ...]:
    """The profile of each instance; none where all are of one Pod."""
    if all(pool.instance.size == 1 for pool in pools):
        return ()
    kinds = [_profile(pool, profile, told_tokens) for pool in pools]
    return tuple(kind for pool, kind in zip(pools, kinds, strict=True) for _ in range(pool.replicas))


def _profile(pool: EnginePool, profile: Profile, told_tokens: int | None) -> Profile:
    parallelism = pool.instance.parallelism
    whole = profile.over(pool.instance.size, tensor=parallelism.tensor, pipeline=parallelism.pipeline)
    if told_tokens is None:
        return whole
    # What an engine is told to hold is the instance's, however many Pods it has.
    return msgspec.structs.replace(whole, kv_capacity_tokens=told_tokens)


def _seconds(target: SloTarget | None, name: str) -> float | None:
    if target is None:
        return None
    if target.target is None:
        raise NotSimulatedError(
            f"spec.slo.{name}.multiplier is not yet simulated: write spec.slo.{name}.target, e.g. 2s"
        )
    return duration_s(target.target)
