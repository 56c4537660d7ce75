"""SGLang's and vllm-router's `cache_aware`: the best prefix while loads are even, else the shortest queue."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_scheduler.conductor.model import Ask, Chance, InstanceView, Placement, World
from mooncake_scheduler.conductor.pairing import active_requests, pair_by_costs


class SglangCacheAware:
    """Longest match where it is long enough and no queue is too long; formula and source: the README."""

    name = "sglang-cache-aware"

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        """Takes the numbers of the router.

        Args:
            cache_threshold: Share of the prompt that the best match must exceed to be followed.
            balance_abs_threshold: Loads are uneven where they differ by more requests than this
            balance_rel_threshold: and the largest is more than so many times the least.
        """
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold is a share from 0 to 1, not {cache_threshold}")
        if balance_abs_threshold < 0:
            raise ValueError(f"balance_abs_threshold is a number of requests, not {balance_abs_threshold}")
        if balance_rel_threshold < 1:
            raise ValueError(f"balance_rel_threshold is a ratio of at least 1, not {balance_rel_threshold}")
        self._match = cache_threshold
        self._absolute = balance_abs_threshold
        self._relative = balance_rel_threshold

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        return pair_by_costs(ask, world, chance, self._costs, self._costs)

    def _costs(self, ask: Ask, views: Sequence[InstanceView]) -> list[float]:
        loads = [active_requests(view) for view in views]
        uneven = max(loads) - min(loads) > self._absolute and max(loads) > self._relative * min(loads)
        best_tokens = max([view.hbm_tokens for view in views])
        if uneven or best_tokens <= self._match * ask.prompt_tokens:
            return [float(load) for load in loads]
        return [float(-view.hbm_tokens) for view in views]
