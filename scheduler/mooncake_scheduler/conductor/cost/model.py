"""The forms of the cost models (conductor.md, Placement); constants come from a profile or from fitting."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec

from mooncake_core.profiles import PIPELINE_CHUNK_TOKENS, Profile
from mooncake_core.registry import Instance


class CostModel(msgspec.Struct, frozen=True, gc=False):
    """Constants of one instance class. Zero bandwidth means unknown: transfers then count as free."""

    a_s: float = 0.0
    b_s_per_token: float = 0.0
    c_s_per_token2: float = 0.0
    t0_s: float = 0.0
    t1_s_per_request: float = 0.0
    t2_s_per_token: float = 0.0
    kv_bytes_per_token: int = 0
    network_bytes_per_s: float = inf
    dram_bytes_per_s: float = inf
    ssd_bytes_per_s: float = inf
    ttft_margin: float = 1.0
    """Times the predicted TTFT within which the promised share of requests really gets its first token."""
    cold: bool = False
    """Nothing was fitted and no profile is known: predictions are no ground for a refusal."""
    cold_prefill: bool = False
    """As `cold`, for prefill alone: an instance class may have shown only one of its sides yet."""
    cold_decode: bool = False
    """As `cold`, for decode alone."""
    stages: int = 1
    """Stages of layers that a prompt passes in chunks, one after the other (chunked pipeline parallelism,
    FAST'25 §3.3)."""
    chunk_tokens: int = PIPELINE_CHUNK_TOKENS
    """Of a prompt a step, where there are stages."""

    @property
    def knows_prefill(self) -> bool:
        """Whether `prefill_s` is a ground for a refusal."""
        return not (self.cold or self.cold_prefill)

    @property
    def knows_decode(self) -> bool:
        """Whether `step_s` is a ground for a refusal."""
        return not (self.cold or self.cold_decode)

    @classmethod
    def from_profile(cls, profile: Profile) -> CostModel:
        """The model a profile stands for."""
        return cls(
            a_s=profile.prefill_a_s,
            b_s_per_token=profile.prefill_b_s_per_token,
            c_s_per_token2=profile.prefill_c_s_per_token2,
            t0_s=profile.decode_t0_s,
            t1_s_per_request=profile.decode_t1_s_per_request,
            t2_s_per_token=profile.decode_t2_s_per_token,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            network_bytes_per_s=profile.network_bytes_per_s,
            dram_bytes_per_s=profile.dram_to_hbm_bytes_per_s,
            ssd_bytes_per_s=profile.ssd_bytes_per_s,
            stages=profile.prefill_stages,
            chunk_tokens=profile.prefill_chunk_tokens,
        )

    def prefill_s(self, tokens: int, cached: int) -> float:
        """T_prefill(n, p): seconds to compute a prompt of `tokens`, the first `cached` of which are there.

        At least one token is always computed: the last one's logits are needed (FAST'25 Fig. 14a's form).
        """
        if cached >= tokens:
            cached = tokens - 1 if tokens else 0
        seconds = (
            self.a_s
            + self.b_s_per_token * (tokens - cached)
            + self.c_s_per_token2 * (tokens * tokens - cached * cached)
        )
        return seconds if self.stages == 1 else seconds + self.drain_s(tokens, cached)

    def occupied_s(self, tokens: int, cached: int) -> float:
        """Seconds after which the next prompt can begin: the first of the stages is free then.

        Without stages that is `prefill_s`.
        """
        seconds = self.prefill_s(tokens, cached)
        return seconds if self.stages == 1 else seconds - self.drain_s(tokens, cached)

    def drain_s(self, tokens: int, cached: int) -> float:
        """Seconds from when the first stage is done with a prompt until the last one is.

        The stages take turns on chunks like machines on the jobs of a flow shop: all the work of one stage,
        and the longest chunk (the last: it looks back on most) once more for each of the others.
        """
        if self.stages == 1:
            return 0.0
        if cached >= tokens:
            cached = tokens - 1 if tokens else 0
        chunk = min(self.chunk_tokens, tokens - cached)
        before = tokens - chunk
        return (self.stages - 1) * (
            self.b_s_per_token * chunk + self.c_s_per_token2 * (tokens * tokens - before * before)
        )

    def step_s(self, batch: int, kv_tokens: int) -> float:
        """Seconds of one decode step: the time between tokens of every request in the batch."""
        return self.t0_s + self.t1_s_per_request * batch + self.t2_s_per_token * kv_tokens

    def transfer_s(self, tokens: int, *, source_flows: int = 0, inbound_flows: int = 0) -> float:
        """Seconds to move the KV of `tokens` over the network, sharing both ends with the flows there."""
        if tokens <= 0:
            return 0.0
        share = 1 + (source_flows if source_flows > inbound_flows else inbound_flows)
        return tokens * self.kv_bytes_per_token * share / self.network_bytes_per_s

    def load_s(self, tokens: int, *, ssd: bool) -> float:
        """Seconds to bring the KV of `tokens` from DRAM or SSD to HBM."""
        if tokens <= 0:
            return 0.0
        return tokens * self.kv_bytes_per_token / (self.ssd_bytes_per_s if ssd else self.dram_bytes_per_s)


def class_of(instance: Instance) -> str:
    """The name under which an instance's cost model is kept: its class, its pool where it names none."""
    return instance.instance_class or instance.pool


class CostModels:
    """The cost model of each instance class, with one for classes never seen."""

    def __init__(
        self, models: Mapping[str, CostModel] | None = None, default: CostModel | None = None
    ) -> None:
        self._models = dict(models or {})
        self._default = default if default is not None else CostModel(cold=True)

    def of(self, instance: Instance) -> CostModel:
        """The model for an instance, by its class (its pool where it names none)."""
        return self._models.get(instance.instance_class or instance.pool, self._default)

    def of_class(self, instance_class: str) -> CostModel:
        """The model of a class; the default's for one never seen."""
        return self._models.get(instance_class, self._default)

    def replace(self, instance_class: str, model: CostModel) -> None:
        """Put a newly fitted model in place."""
        self._models[instance_class] = model
