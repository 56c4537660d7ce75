"""What moving KV takes, learned for instance classes of which nobody has said it.

Precedence: what a profile says; else prefixes that were fetched, as soon as enough were seen; else
hand-overs, whose time has in it the decode instance's queue and first step, so that only the quick ones
count; else nothing is known and a transfer counts as free, which brings about the first fetches.
"""

from __future__ import annotations

from collections import deque
from math import isinf

from msgspec.structs import replace

from mooncake_scheduler.conductor.cost.model import CostModels

LEAST_TOKENS = 1_024
"""Shorter transfers are ruled by what every one takes, however short."""
LEAST_SEEN = 8
MEMORY = 64
_FETCH_QUANTILE = 0.5
_HAND_OVER_QUANTILE = 0.25
_UNIT_BYTES = 1
"""Of a token's KV where its size is not known: rates are in tokens then, and predictions need no more."""


class TransferFitting:
    """Keeps the bandwidth of `CostModels` in step with what is observed."""

    def __init__(self, costs: CostModels) -> None:
        self._costs = costs
        self._seen: dict[str, _Paces] = {}

    def observe_fetch(self, instance_class: str, tokens: int, seconds: float) -> None:
        """The KV of `tokens` was fetched alone in so many seconds."""
        self._observe(instance_class, tokens, seconds, hand_over=False)

    def observe_hand_over(self, instance_class: str, tokens: int, seconds: float) -> None:
        """The KV of `tokens` was handed over and the first token made of it in so many seconds."""
        self._observe(instance_class, tokens, seconds, hand_over=True)

    def _observe(self, instance_class: str, tokens: int, seconds: float, *, hand_over: bool) -> None:
        if tokens < LEAST_TOKENS or not 0.0 < seconds < float("inf"):
            return
        seen = self._seen.get(instance_class)
        model = self._costs.of_class(instance_class)
        if seen is None:
            if not isinf(model.network_bytes_per_s):
                return
            seen = self._seen[instance_class] = _Paces()
        (seen.hand_overs if hand_over else seen.fetches).append(seconds / tokens)
        s_per_token = seen.s_per_token()
        if s_per_token is None:
            return
        kv_bytes = model.kv_bytes_per_token or _UNIT_BYTES
        model = replace(model, kv_bytes_per_token=kv_bytes, network_bytes_per_s=kv_bytes / s_per_token)
        self._costs.replace(instance_class, model)


class _Paces:
    """Seconds a token, the last ones seen."""

    __slots__ = ("fetches", "hand_overs")

    def __init__(self) -> None:
        self.fetches: deque[float] = deque(maxlen=MEMORY)
        self.hand_overs: deque[float] = deque(maxlen=MEMORY)

    def s_per_token(self) -> float | None:
        for paces, share in ((self.fetches, _FETCH_QUANTILE), (self.hand_overs, _HAND_OVER_QUANTILE)):
            if len(paces) >= LEAST_SEEN:
                return sorted(paces)[int(share * (len(paces) - 1))]
        return None
