"""The least loaded instance of each side, blind to caches."""

from __future__ import annotations

from mooncake_scheduler.conductor.model import Ask, Chance, Placement, World
from mooncake_scheduler.conductor.placement import (
    compose,
    decode_partners,
    estimate_local,
    least_tbt,
    no_instance,
    pick_tied,
)


class LoadBalance:
    """Fewest predicted seconds queued for prefill, least TBT for decode."""

    name = "load-balance"

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        cost = world.cost
        left = list(world.prefill)
        while left:
            least_s = min(view.load.queued_s for view in left)
            chosen = pick_tied([view for view in left if view.load.queued_s == least_s], chance)
            partners = decode_partners(chosen, world)
            if partners:
                prefill = estimate_local(ask, chosen, cost.of(chosen.instance))
                return compose(ask, world, prefill, least_tbt(ask, partners, world, chance))
            left.remove(chosen)
        raise no_instance(world)
