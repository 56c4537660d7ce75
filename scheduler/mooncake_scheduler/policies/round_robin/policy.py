"""Each side in turn."""

from __future__ import annotations

from mooncake_scheduler.conductor.model import Ask, Chance, Placement, World
from mooncake_scheduler.conductor.placement import compose, decode_partners, estimate_local, no_instance


class RoundRobin:
    """The next prefill instance by id, and the next of its partners. Its two counters are its only state."""

    name = "round-robin"

    def __init__(self) -> None:
        self._prefill_turn = 0
        self._decode_turn = 0

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        # By id: the order in which a registry lists instances must not matter.
        in_order = sorted(world.prefill, key=lambda view: view.instance.id)
        for _ in in_order:
            chosen = in_order[self._prefill_turn % len(in_order)]
            self._prefill_turn += 1
            partners = sorted(decode_partners(chosen, world), key=lambda view: view.instance.id)
            if partners:
                decode = partners[self._decode_turn % len(partners)]
                self._decode_turn += 1
                prefill = estimate_local(ask, chosen, world.cost.of(chosen.instance))
                return compose(ask, world, prefill, decode)
        raise no_instance(world)
