"""NVIDIA Dynamo's KV router: prefill and decode work in blocks, less what is cached."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_scheduler.conductor.model import Ask, Chance, InstanceView, Placement, World
from mooncake_scheduler.conductor.pairing import active_requests, pair_by_costs

_BLOCK_TOKENS = 16
"""Where an instance does not say how large its blocks are."""


class Dynamo:
    """Least blocks to prefill and to decode; the README beside this file has the formula and its source."""

    name = "dynamo"

    def __init__(
        self,
        prefill_load_scale: float = 1.0,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        shared_cache_multiplier: float = 0.0,
        decode_active_request_weight: float = 0.0,
        router_temperature: float = 0.0,
    ) -> None:
        """Takes the numbers of the router, under its own names.

        Args:
            prefill_load_scale: Weight of prefill blocks against decode blocks.
            overlap_score_credit: Of a block that the instance holds, how much is not counted as work.
            overlap_score_credit_decay: How fast that shrinks where an instance has more queued than another.
            shared_cache_multiplier: The same credit for a block that only the shared store holds.
            decode_active_request_weight: Blocks that each active request counts as.
            router_temperature: 0 = the least cost; above, drawn at random, low costs more often.
        """
        settings = {
            "prefill_load_scale": prefill_load_scale,
            "overlap_score_credit": overlap_score_credit,
            "overlap_score_credit_decay": overlap_score_credit_decay,
            "shared_cache_multiplier": shared_cache_multiplier,
            "decode_active_request_weight": decode_active_request_weight,
            "router_temperature": router_temperature,
        }
        for setting, value in settings.items():
            if value < 0:
                raise ValueError(f"{setting} is 0 or more, not {value}")
        self._prefill_scale = prefill_load_scale
        self._credit = overlap_score_credit
        self._decay = overlap_score_credit_decay
        self._shared = shared_cache_multiplier
        self._request_blocks = decode_active_request_weight
        self._temperature = router_temperature

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        return pair_by_costs(
            ask, world, chance, self._prefill_costs, self._decode_costs, temperature=self._temperature
        )

    def _prefill_costs(self, ask: Ask, views: Sequence[InstanceView]) -> list[float]:
        least_tokens = min([view.load.queued_tokens for view in views])
        return [self._prefill_cost(ask, view, view.load.queued_tokens - least_tokens) for view in views]

    def _prefill_cost(self, ask: Ask, view: InstanceView, excess_tokens: int) -> float:
        block_tokens = view.instance.block_size_tokens or _BLOCK_TOKENS
        credit = self._credit / (1 + self._decay * excess_tokens / max(1, ask.prompt_tokens))
        held = view.hbm_tokens // block_tokens
        shared = max(0, view.fetchable_tokens // block_tokens - held)
        blocks = (view.load.queued_tokens + ask.prompt_tokens) / block_tokens
        work = max(0.0, blocks - credit * held - self._shared * shared)
        return self._prefill_scale * work + self._decode_blocks(view)

    def _decode_costs(self, ask: Ask, views: Sequence[InstanceView]) -> list[float]:
        return [self._decode_blocks(view) for view in views]

    def _decode_blocks(self, view: InstanceView) -> float:
        """Blocks that those decode who are there; the request's own count the same everywhere."""
        block_tokens = view.instance.block_size_tokens or _BLOCK_TOKENS
        return view.load.kv_tokens / block_tokens + self._request_blocks * active_requests(view)
