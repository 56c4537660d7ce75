"""Algorithm 1 without its transfer branch: every instance counts with its own cache alone."""

from __future__ import annotations

from mooncake_scheduler.conductor.model import Ask, Chance, Placement, World
from mooncake_scheduler.conductor.placement import compose, estimate_local, least_tbt, least_ttft


class CacheAware:
    """Least TTFT where only what an instance holds itself shortens its prefill."""

    name = "cache-aware"

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        cost = world.cost
        estimates = [estimate_local(ask, view, cost.of(view.instance)) for view in world.prefill]
        chosen, partners = least_ttft(ask, estimates, world, chance)
        return compose(ask, world, chosen, least_tbt(ask, partners, world, chance), estimates=estimates)
