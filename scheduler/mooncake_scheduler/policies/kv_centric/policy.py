"""Algorithm 1 refined: the default. The README beside this file says what is refined, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from mooncake_core.registry import Role
from mooncake_scheduler.conductor.model import Ask, Chance, InstanceView, Placement, World
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.placement import (
    DecodeEstimate,
    PrefillEstimate,
    compose,
    decode_partners,
    estimate_decode,
    estimate_fetched,
    estimate_local,
    exceeds_ratio,
    in_order,
    no_instance,
    pick_tied,
    rank_decode,
)

_BOTH = Role.BOTH

FEW = 2
"""How many decode instances are looked at closely, at the moment of arrival."""


class KvCentric:
    """Least predicted TTFT, fetching only where it wins, with the pair chosen jointly."""

    name: ClassVar = "kv-centric"

    def __init__(
        self,
        balancing_threshold: float = 1.5,
        disaggregation_threshold_tokens: int = 0,
        tie_window: float = 0.005,
        shortest_first: bool = True,
    ) -> None:
        """Takes the settings of the policy.

        Args:
            balancing_threshold: Ratio best_len / prefix_len above which a fetch is weighed at all.
            disaggregation_threshold_tokens: A decode instance prefills a rest of at most so many tokens
                itself; 0 = never.
            tie_window: Predicted TTFTs that differ by no more than this share count as equal.
            shortest_first: Prefills wait for their turns in the Conductor, short ones first; else in the
                engines, as they came.
        """
        if balancing_threshold < 1:
            raise ValueError(f"balancing_threshold is a ratio of at least 1, not {balancing_threshold}")
        if disaggregation_threshold_tokens < 0:
            raise ValueError("disaggregation_threshold_tokens is a number of tokens, 0 or more")
        if tie_window < 0:
            raise ValueError("tie_window is a share, 0 or more")
        self._threshold = balancing_threshold
        self._own_prefill_tokens = disaggregation_threshold_tokens
        self._window = 1 + tie_window
        self.order = QueueOrder() if shortest_first else None

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        return next(self.propose(ask, world, chance))

    def propose(self, ask: Ask, world: World, chance: Chance) -> Iterator[Placement]:
        """Placements, best first: a decode instance alone where that wins, then pair after pair.

        After the first pair only those with other partners follow: where the partners are the same, a slower
        prefill has no better prospect.
        """
        estimates = self._prefills(ask, world)
        alone = None
        if self._own_prefill_tokens and estimates:
            alone = self._decode_alone(ask, world, min([each.ttft_s for each in estimates]))
        if alone is not None:
            yield compose(ask, world, alone, alone.view, estimates=[*estimates, alone])
        left = estimates
        found = alone is not None
        while left:
            choice = self._best_pair(ask, world, left, chance)
            if choice is None:
                break
            prefill, decode, estimate = choice
            found = True
            yield compose(ask, world, prefill, decode, estimates=estimates, estimate=estimate)
            # Reached only where the pair was refused.
            tried = _group(prefill)
            left = [each for each in left if _group(each) != tried]
        if not found:
            raise no_instance(world)

    def prefill_at(self, ask: Ask, world: World) -> PrefillEstimate:
        """What it is predicted to take at the one prefill instance of a world."""
        return self._prefills(ask, world)[0]

    def _prefills(self, ask: Ask, world: World) -> list[PrefillEstimate]:
        cost = world.cost
        threshold, order = self._threshold, self.order
        estimates = []
        for view in world.prefill:
            model = cost.of(view.instance)
            estimate = estimate_local(ask, view, model)
            if exceeds_ratio(view, threshold):
                fetched = estimate_fetched(ask, view, model)
                if fetched.ttft_s <= estimate.ttft_s:
                    estimate = fetched
            if order is not None and view.load.waiting and view.instance.role is not _BOTH:
                drain_s = 0.0
                if model.stages > 1:
                    drain_s = model.drain_s(ask.prompt_tokens, estimate.prefix_tokens)
                estimate = in_order(estimate, order, world.now_s, drain_s)
            estimates.append(estimate)
        return estimates

    def _best_pair(
        self, ask: Ask, world: World, estimates: Sequence[PrefillEstimate], chance: Chance
    ) -> tuple[PrefillEstimate, InstanceView, DecodeEstimate] | None:
        """The pair of least TTFT; among ties the one whose decode side is better, then by chance.

        Instances of one group share their partners, so the decode side is looked at once a group. A group
        whose decode side has no room comes after all that have some.
        """
        left = estimates
        without_room: tuple[PrefillEstimate, InstanceView, DecodeEstimate] | None = None
        while left:
            ranks_s = [each.rank_s for each in left]
            limit_s = min(ranks_s) * self._window
            tied: dict[object, list[PrefillEstimate]] = {}
            for each, rank_s in zip(left, ranks_s, strict=True):
                if rank_s <= limit_s:
                    tied.setdefault(_group(each), []).append(each)
            choices = [
                (pick_tied(group, chance), *side)
                for group in tied.values()
                if (side := self._decode_side(ask, world, group[0], chance)) is not None
            ]
            if choices:
                choice = choices[0]
                if len(choices) > 1:
                    best = min([choice[2][:2] for choice in choices])
                    choice = pick_tied([each for each in choices if each[2][:2] == best], chance)
                if not choice[2].overfull:
                    return choice
                without_room = without_room or choice
            left = [each for each in left if _group(each) not in tied]
        return without_room

    def _decode_side(
        self, ask: Ask, world: World, prefill: PrefillEstimate, chance: Chance
    ) -> tuple[InstanceView, DecodeEstimate] | None:
        """The best partner at the moment of arrival, out of the few that look best now; None without one."""
        partners = decode_partners(prefill.view, world)
        if not partners:
            return None
        cost = world.cost
        now_s = world.now_s
        arrival_s = now_s + prefill.ttft_s
        if len(partners) == 1:
            view = partners[0]
            return view, estimate_decode(ask, view, cost.of(view.instance), now_s, arrival_s)
        if len(partners) > FEW:
            # The chance breaks ties here too: a row of idle instances must not fill from the left.
            ranked = [
                (rank_decode(ask, view, cost.of(view.instance)), chance.random(), at)
                for at, view in enumerate(partners)
            ]
            ranked.sort()
            partners = [partners[at] for _, _, at in ranked[:FEW]]
        sides = [
            (view, estimate_decode(ask, view, cost.of(view.instance), now_s, arrival_s)) for view in partners
        ]
        best = min([side[1][:2] for side in sides])
        return pick_tied([side for side in sides if side[1][:2] == best], chance)

    def _decode_alone(self, ask: Ask, world: World, pair_ttft_s: float) -> PrefillEstimate | None:
        """Conditional disaggregation: the decode instance that prefills a short rest at least as fast itself.

        Its batch stalls for that prefill; the stall must stay inside the TBT target.
        """
        target_s = world.slo.tbt_s
        best: PrefillEstimate | None = None
        for view in world.decode:
            if view.instance.role is not Role.DECODE or not view.hbm_tokens:
                continue
            if ask.prompt_tokens - view.hbm_tokens > self._own_prefill_tokens:
                continue
            model = world.cost.of(view.instance)
            estimate = estimate_local(ask, view, model)
            if estimate.ttft_s > pair_ttft_s or (best is not None and estimate.ttft_s >= best.ttft_s):
                continue
            overfull, tbt_s = rank_decode(ask, view, model)
            busy = view.load.batch > 0
            if overfull or (busy and target_s is not None and tbt_s + estimate.prefill_s > target_s):
                continue
            best = estimate
        return best


def _group(estimate: PrefillEstimate) -> object:
    """Prefill instances with the same key have the same partners."""
    instance = estimate.view.instance
    if instance.role is _BOTH:
        return instance.id
    return (instance.model, instance.revision, instance.connector, instance.topology_domain)
