"""Any pair that may work together: the baseline of all comparisons."""

from __future__ import annotations

from mooncake_scheduler.conductor.model import Ask, Chance, Placement, World
from mooncake_scheduler.conductor.placement import (
    compose,
    decode_partners,
    estimate_local,
    no_instance,
    pick_tied,
)


class Random:
    """Each side uniformly at random."""

    name = "random"

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        left = list(world.prefill)
        while left:
            chosen = pick_tied(left, chance)
            partners = decode_partners(chosen, world)
            if partners:
                prefill = estimate_local(ask, chosen, world.cost.of(chosen.instance))
                return compose(ask, world, prefill, pick_tied(partners, chance))
            left.remove(chosen)
        raise no_instance(world)
