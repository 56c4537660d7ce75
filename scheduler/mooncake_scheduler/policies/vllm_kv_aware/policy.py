"""vllm-router's `kv_aware`: tokens to compute, times the requests that share the instance."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_scheduler.conductor.model import Ask, Chance, InstanceView, Placement, World
from mooncake_scheduler.conductor.pairing import active_requests, pair_by_costs


class VllmKvAware:
    """Least (uncached + queued tokens) × (active requests + 1); formula and source are in the README."""

    name = "vllm-kv-aware"

    def __init__(
        self,
        kv_penalty_external: float = 0.6,
        kv_penalty_disk: float = 0.3,
        kv_aware_temperature: float = 0.0,
    ) -> None:
        """Takes the numbers of the router.

        Args:
            kv_penalty_external: What a token counts that would come from a store's memory; 1 = as if held.
            kv_penalty_disk: What a token counts that would come from a store's disk.
            kv_aware_temperature: 0 = the least cost; above, drawn at random, low costs more often.
        """
        for setting, value in (("external", kv_penalty_external), ("disk", kv_penalty_disk)):
            if not 0 <= value <= 1:
                raise ValueError(f"kv_penalty_{setting} is a share from 0 to 1, not {value}")
        if kv_aware_temperature < 0:
            raise ValueError(f"kv_aware_temperature is 0 or more, not {kv_aware_temperature}")
        self._external = kv_penalty_external
        self._disk = kv_penalty_disk
        self._temperature = kv_aware_temperature

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        return pair_by_costs(ask, world, chance, self._costs, self._costs, temperature=self._temperature)

    def _costs(self, ask: Ask, views: Sequence[InstanceView]) -> list[float]:
        return [self._cost(ask, view) for view in views]

    def _cost(self, ask: Ask, view: InstanceView) -> float:
        # The last token is never credited: its logits have to be computed.
        most = max(0, ask.prompt_tokens - 1)
        held = min(view.hbm_tokens, most)
        beyond = max(0, min(view.fetchable_tokens, most) - held)
        on_disk = min(view.fetch_ssd_tokens, beyond)
        credit = held + on_disk * self._disk + (beyond - on_disk) * self._external
        return (ask.prompt_tokens - credit + view.load.queued_tokens) * (active_requests(view) + 1)
