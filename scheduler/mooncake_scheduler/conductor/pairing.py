"""The way of routers that give each engine a number of their own: the least one on each side makes the pair.

Used for the published formulas of peers. They choose; what the pair is predicted to take is worked out by
the arithmetic that all policies share (`placement`), so that admission and ledger read the same seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from typing import TypeAlias

from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import Ask, Chance, InstanceView, Placement, World
from mooncake_scheduler.conductor.placement import (
    PrefillEstimate,
    compose,
    decode_partners,
    estimate_fetched,
    estimate_local,
    no_instance,
    pick_tied,
)

Costs: TypeAlias = Callable[[Ask, Sequence[InstanceView]], Sequence[float]]
"""A number for each of several instances, the lower the better; comparisons among them are allowed."""


def pair_by_costs(
    ask: Ask,
    world: World,
    chance: Chance,
    prefill_costs: Costs,
    decode_costs: Costs,
    *,
    temperature: float = 0.0,
) -> Placement:
    """The prefill instance of least cost that has a partner, and its partner of least cost.

    Args:
        ask: The request.
        world: What is known.
        chance: Breaks ties, and draws where a temperature is given.
        prefill_costs: Numbers of those that can prefill.
        decode_costs: Numbers of the chosen one's partners.
        temperature: 0 = the least; above, drawn by a softmax over the costs between least (0) and most (1).

    Raises:
        NoInstanceError: there is no candidate, or no pair that may work together.
    """
    able = [view for view in world.prefill if decode_partners(view, world)]
    if not able:
        raise no_instance(world)
    chosen = _pick(able, prefill_costs(ask, able), chance, temperature)
    partners = decode_partners(chosen, world)
    decode = _pick(partners, decode_costs(ask, partners), chance, temperature)
    return compose(ask, world, _as_engines_do(ask, chosen, world.cost.of(chosen.instance)), decode)


def active_requests(view: InstanceView) -> int:
    """Requests sent to an instance and not answered: in its queue, on their way to its batch, or in it."""
    load = view.load
    return load.batch + max(load.queued, load.arriving)


def _as_engines_do(ask: Ask, view: InstanceView, model: CostModel) -> PrefillEstimate:
    """A router that does not command fetches leaves it to the engine, which fetches where that is faster."""
    local = estimate_local(ask, view, model)
    if view.instance.fetch == "none" or view.fetchable_tokens <= view.hbm_tokens:
        return local
    fetched = estimate_fetched(ask, view, model)
    return fetched if fetched.ttft_s < local.ttft_s else local


def _pick(
    views: Sequence[InstanceView], costs: Sequence[float], chance: Chance, temperature: float
) -> InstanceView:
    least = min(costs)
    if temperature:
        spread = (max(costs) - least) or 1.0
        return _draw(views, [exp(-(cost - least) / (spread * temperature)) for cost in costs], chance)
    return pick_tied([view for view, cost in zip(views, costs, strict=True) if cost == least], chance)


def _draw(views: Sequence[InstanceView], weights: Sequence[float], chance: Chance) -> InstanceView:
    left = chance.random() * sum(weights)
    for view, weight in zip(views, weights, strict=True):
        left -= weight
        if left < 0:
            return view
    return views[-1]
