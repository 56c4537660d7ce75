"""KVCache-centric scheduling as published (FAST'25 §4, Algorithm 1)."""

from __future__ import annotations

from mooncake_scheduler.conductor.model import Ask, Chance, Placement, World
from mooncake_scheduler.conductor.placement import (
    compose,
    estimate_fetched,
    estimate_local,
    exceeds_ratio,
    least_tbt,
    least_ttft,
)


class Algorithm1:
    """Least TTFT over all prefill instances, fetching the prefix where the best holder has far more of it."""

    name = "algorithm-1"

    def __init__(self, balancing_threshold: float = 1.5) -> None:
        """Takes `balancing_threshold`: the ratio best_len / prefix_len above which a prefix is fetched."""
        if balancing_threshold < 1:
            raise ValueError(f"balancing_threshold is a ratio of at least 1, not {balancing_threshold}")
        self._threshold = balancing_threshold

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        cost = world.cost
        threshold = self._threshold
        estimates = [
            (estimate_fetched if exceeds_ratio(view, threshold) else estimate_local)(
                ask, view, cost.of(view.instance)
            )
            for view in world.prefill
        ]
        chosen, partners = least_ttft(ask, estimates, world, chance)
        return compose(ask, world, chosen, least_tbt(ask, partners, world, chance), estimates=estimates)
