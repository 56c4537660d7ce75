"""Whether a prefill that waits for its turn at one instance had better take it at another.

A request is bound to an instance when it comes, by what was known then. While it waits, shorter ones overtake
it, and another instance runs out of work: then it is bound anew. Its promise stands, and nobody else's is
touched: it goes only to where nobody waits, and those behind it move up.

Pure: what waits where, and the moment, come in as parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec

from mooncake_core.ledger import InstanceLoad, Waiting
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.model import Ask, InstanceView, Placement, World
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.placement import PrefillEstimate, may_pair

LEAST_GAIN_S = 0.05
"""Seconds by which its first token has to come earlier: less is within what predictions err by."""
MOST_MOVES = 2
"""Of one request: it must not wander about while others are served."""


PrefillAt: TypeAlias = Callable[[Ask, World], PrefillEstimate]
"""What a policy predicts a prefill to take at the one prefill instance of a world (its `prefill_at`)."""


class Standing(NamedTuple):
    """Where a prefill stands that waits for its turn."""

    end_s: float
    """Seconds until it will have ended, if nobody else comes."""
    relief_s: float
    """What those behind it gain if it leaves, added up."""


class Move(NamedTuple):
    """Another instance for a prefill that waits."""

    worth_s: float
    """Seconds by which first tokens come earlier, its own and those of others, added up."""
    placement: Placement
    """Its seconds count from when the request was reserved, as those of the one before do."""


class Rebinding:
    """Late binding, for a policy under which turns are taken in an order.

    Args:
        prefill_at: tells what a prefill takes where.
        order: of the turns.
    """

    def __init__(self, prefill_at: PrefillAt, order: QueueOrder) -> None:
        self.prefill_at = prefill_at
        self._order = order

    def standings(self, load: InstanceLoad, now_s: float) -> dict[Waiting, Standing]:
        """Of all that wait at one instance. Of two that are alike, that of the later one."""
        begin_s = load.handed_over_s
        sequence = self._order.sequence(load.waiting, now_s + begin_s)
        found: dict[Waiting, Standing] = {}
        end_us = 0
        for at, each in enumerate(sequence):
            end_us += each.cost_us
            found[each] = Standing(begin_s + end_us / 1e6, each.cost_us / 1e6 * (len(sequence) - at - 1))
        return found

    def move(
        self,
        ask: Ask,
        placement: Placement,
        waiting: Waiting,
        standing: Standing,
        there: InstanceView,
        costs: CostModels,
        now_s: float,
    ) -> Move | None:
        """The same request with its prefill at another instance; None where it gains too little by that.

        Args:
            ask: the request.
            placement: where it is bound now.
            waiting: as it waits there.
            standing: where it stands there (`standings`).
            there: an instance with room (`InstanceLoad.has_room`), with what it holds of the prompt.
            costs: of prefill.
            now_s: the moment.
        """
        here = placement.prefill
        if here is None or here.id == there.instance.id or not may_pair(there.instance, placement.decode):
            return None
        if not costs.of(there.instance).knows_prefill:
            return None
        found = self.prefill_at(ask, World(now_s, (there,), (), costs))
        drain_s = costs.of(here).drain_s(ask.prompt_tokens, placement.prefix_tokens)
        gain_s = standing.end_s + drain_s - found.ttft_s
        if gain_s < LEAST_GAIN_S:
            return None
        waited_s = now_s - waiting.reserved_s
        moved = msgspec.structs.replace(
            placement,
            prefill=there.instance,
            prefix_tokens=found.prefix_tokens,
            fetch_tokens=found.fetch_tokens,
            queue_s=waited_s + found.queue_s,
            transfer_s=found.transfer_s,
            prefill_s=found.prefill_s,
            ttft_s=waited_s + found.ttft_s,
        )
        return Move(gain_s + standing.relief_s, moved)
