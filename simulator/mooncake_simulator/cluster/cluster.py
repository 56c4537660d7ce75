"""What a simulated cluster consists of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.profiles import LLAMA3_70B_A800, Profile
from mooncake_simulator.cluster.failures import Failure
from mooncake_simulator.cluster.tiers import StoreTiers
from mooncake_simulator.workloads.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster of prefill and decode instances of one profile, and how it is driven."""

    prefill: int
    decode: int
    profile: Profile = LLAMA3_70B_A800
    prefill_profiles: tuple[Profile, ...] = ()
    """Of each prefill instance, where they differ or consist of several Pods; empty = `profile` for all."""
    decode_profiles: tuple[Profile, ...] = ()
    """The same for decode."""
    policy: str = "kv-centric"
    balancing_threshold: float = 1.5
    shortest_first: bool = True
    """Turns at prefill instances, where the policy knows an order; else first come, first served."""
    admission: AdmissionMode = AdmissionMode.NONE
    holding: bool | None = None
    """Whether a prefilled request may wait for a place to decode; None = with `predictive`, as live."""
    ttft_target_s: float | None = None
    tbt_target_s: float | None = None
    fetch: Literal["none", "peer", "store"] = "peer"
    """From where a prefill instance gets blocks that it lacks."""
    cache_tokens: int | None = 3_000_000
    """KV that one Pod of a prefill instance keeps; None = without end."""
    store_tokens: int | None = None
    """KV that the shared store keeps, with `fetch` store; None = without end."""
    failures: tuple[Failure, ...] = ()
    """Instances that die, each at its time."""
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
    max_batch: int = 0
    """Requests that a decode instance has in its batch at most; 0 = as many as its memory holds."""

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < (0 if self.coupled else 1):
            raise ValueError(
                f"{self.prefill} prefill and {self.decode} decode instances serve nobody: give one of each"
            )
        if self.coupled and self.failures:
            raise ValueError("failures of coupled engines are not simulated: leave `failures` out")
        known = [f"p-{at}" for at in range(self.prefill)] + [f"d-{at}" for at in range(self.decode)]
        for failure in self.failures:
            if failure.instance not in known:
                raise ValueError(f"{failure.instance} cannot die: there are {', '.join(known)}")
        for before, after in pairwise(sorted(self.failures, key=lambda each: (each.instance, each.at_s))):
            if before.instance == after.instance and after.at_s <= before.back_s:
                raise ValueError(
                    f"{after.instance} cannot die at {after.at_s:g} s: it died at {before.at_s:g} s and is "
                    f"back at {before.back_s:g} s (inf = never): let one end before the other begins"
                )
        self._check_amounts()
        if self.tiers is not None and self.fetch != "store":
            raise ValueError("tiers are those of a shared store: they need `fetch` store")
        if self.coupled and (self.decode or self.fetch != "none"):
            raise ValueError("coupled engines are counted by `prefill` alone and fetch from nowhere")
        for field, count, profiles in (
            ("prefill_profiles", self.prefill, self.prefill_profiles),
            ("decode_profiles", self.decode, self.decode_profiles),
        ):
            if profiles and len(profiles) != count:
                raise ValueError(
                    f"{field} has {len(profiles)} profiles: give one for each of the {count}, or none"
                )
            if profiles and self.coupled:
                raise ValueError(f"{field}: coupled engines are all of one profile, and of one Pod each")

    def _check_amounts(self) -> None:
        for field, target_s in (("ttft_target_s", self.ttft_target_s), ("tbt_target_s", self.tbt_target_s)):
            if target_s is not None and not 0 < target_s < inf:
                raise ValueError(f"{field} is a number of seconds above 0, or None for no target: {target_s}")
        for field, tokens in (("cache_tokens", self.cache_tokens), ("store_tokens", self.store_tokens)):
            if tokens is not None and tokens < 0:
                raise ValueError(f"{field} is a number of tokens, 0 or more, or None for no end: {tokens}")
        if self.max_batch < 0 or (self.coupled and self.max_batch):
            raise ValueError(
                f"max_batch is a number of requests, 0 for no end, and of coupled engines 0: {self.max_batch}"
            )
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is at least 1, not {self.chunk_tokens}")
        for field, amount in (
            ("load_age_s", self.load_age_s),
            ("join_load_bytes_per_s", self.join_load_bytes_per_s),
        ):
            if not 0 <= amount < inf:
                raise ValueError(f"{field} is a finite number, 0 or more, not {amount}")

    def resized(self, prefill: int, decode: int) -> ClusterSpec:
        """The same cluster with more or fewer instances of the kinds that it has.

        Raises:
            ValueError: instances of one side differ, so that it is not said which there are more of.
        """
        kinds = []
        for count, profiles in ((prefill, self.prefill_profiles), (decode, self.decode_profiles)):
            if len(set(profiles)) > 1:
                raise ValueError("instances of one side differ: more of which? Give them one shape")
            kinds.append(profiles[:1] * count)
        first, last = kinds
        return replace(self, prefill=prefill, decode=decode, prefill_profiles=first, decode_profiles=last)

    @property
    def holds(self) -> bool:
        """Whether prefilled requests wait; whole engines have nowhere to keep one."""
        if self.coupled:
            return False
        return self.admission is AdmissionMode.PREDICTIVE if self.holding is None else self.holding

    @property
    def prefill_kinds(self) -> tuple[Profile, ...]:
        """The profile of each prefill instance."""
        return self.prefill_profiles or (self.profile,) * self.prefill

    @property
    def decode_kinds(self) -> tuple[Profile, ...]:
        """The profile of each decode instance."""
        return self.decode_profiles or (self.profile,) * self.decode

    @property
    def cache_blocks(self) -> list[int | None]:
        """Blocks that each prefill instance keeps."""
        tokens = self.cache_tokens
        return [None if tokens is None else tokens * each.pods // BLOCK_TOKENS for each in self.prefill_kinds]

    @property
    def store_blocks(self) -> int | None:
        """Blocks that the store keeps."""
        return None if self.store_tokens is None else self.store_tokens // BLOCK_TOKENS
