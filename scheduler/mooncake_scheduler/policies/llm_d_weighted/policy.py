"""llm-d's scheduler: scores from 0 to 1 for prefix, queue and KV memory, added up by weight."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_scheduler.conductor.model import Ask, Chance, InstanceView, Placement, World
from mooncake_scheduler.conductor.pairing import pair_by_costs


class LlmDWeighted:
    """The most of 3 × prefix + 2 × queue + 2 × free KV memory; formula and source are in the README."""

    name = "llm-d-weighted"

    def __init__(
        self,
        prefix_cache_weight: float = 3.0,
        queue_weight: float = 2.0,
        kv_cache_utilization_weight: float = 2.0,
    ) -> None:
        """Takes the weight of each scorer.

        Args:
            prefix_cache_weight: Of the share of the prompt that is held.
            queue_weight: Of the shortness of the queue, among the candidates.
            kv_cache_utilization_weight: Of the share of KV memory that is free.
        """
        weights = (prefix_cache_weight, queue_weight, kv_cache_utilization_weight)
        if min(weights) < 0:
            raise ValueError(f"a scorer's weight is 0 or more; these are {weights}")
        self._prefix, self._queue, self._memory = weights

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        return pair_by_costs(ask, world, chance, self._costs, self._costs)

    def _costs(self, ask: Ask, views: Sequence[InstanceView]) -> list[float]:
        waiting = [view.load.queued for view in views]
        most, spread = max(waiting), max(waiting) - min(waiting)
        return [
            -self._prefix * min(1.0, view.hbm_tokens / max(1, ask.prompt_tokens))
            - self._queue * ((most - queue) / spread if spread else 1.0)
            - self._memory * (1.0 - _kv_used(view))
            for view, queue in zip(views, waiting, strict=True)
        ]


def _kv_used(view: InstanceView) -> float:
    """Share of KV memory in use; 0 where nobody has said how much there is."""
    capacity_tokens = view.instance.kv_capacity_tokens
    return min(1.0, view.load.kv_tokens / capacity_tokens) if capacity_tokens > 0 else 0.0
