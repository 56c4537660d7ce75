"""The arithmetic that all policies share: what a candidate is predicted to take, and who may work with whom.

Seconds throughout. TTFT(i) = T_transfer + T_queue(i) + T_prefill (FAST'25 §4, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from mooncake_core.ledger import Waiting
from mooncake_core.registry import Instance, Role
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import (
    Ask,
    Chance,
    Considered,
    ConsideredDecode,
    InstanceView,
    NoInstanceError,
    Placement,
    World,
)
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.prediction import DecodeLoad, decode_at

T = TypeVar("T")

_BOTH = Role.BOTH  # an enum's member is looked up slowly, and this is asked for every candidate


class PrefillEstimate(msgspec.Struct, frozen=True, gc=False):
    """What a prefill on one instance is predicted to take."""

    ttft_s: float
    queue_s: float
    transfer_s: float
    prefill_s: float
    prefix_tokens: int
    """Tokens that need no computing: those held, and those fetched."""
    fetch_tokens: int
    view: InstanceView
    delay_s: float = 0.0
    """What it would make those that wait behind it wait longer, added up: a price in the choice alone."""

    @property
    def rank_s(self) -> float:
        """What a choice goes by."""
        return self.ttft_s + self.delay_s


class DecodeEstimate(NamedTuple):
    """What a decode instance is predicted to be like with this request in its batch.

    Sorts by preference: one whose limits hold before one whose limits do not, then by time between tokens.
    """

    overfull: bool
    """Its batch or its KV memory has no room for the request."""
    tbt_s: float
    load: DecodeLoad
    """What it carries, without this request."""


def estimate_local(ask: Ask, view: InstanceView, model: CostModel) -> PrefillEstimate:
    """The prefill with what the instance holds itself."""
    prefix_tokens = view.hbm_tokens
    if prefix_tokens >= ask.prompt_tokens:
        # The last token is always computed: its logits are the first answer.
        prefix_tokens = max(0, ask.prompt_tokens - 1)
    queue_s = view.load.queued_s
    prefill_s = model.prefill_s(ask.prompt_tokens, prefix_tokens)
    return PrefillEstimate(queue_s + prefill_s, queue_s, 0.0, prefill_s, prefix_tokens, 0, view)


def estimate_fetched(ask: Ask, view: InstanceView, model: CostModel) -> PrefillEstimate:
    """The prefill after fetching all of the prefix that the instance can fetch.

    The transfer streams from DRAM and SSD at once, so the slowest of network and tiers sets its pace.
    """
    prefix_tokens = view.fetchable_tokens
    if prefix_tokens >= ask.prompt_tokens:
        prefix_tokens = max(0, ask.prompt_tokens - 1)
    fetch_tokens = max(0, prefix_tokens - view.hbm_tokens)
    ssd_tokens = min(view.fetch_ssd_tokens, fetch_tokens)
    transfer_s = max(
        model.transfer_s(fetch_tokens, source_flows=view.source_flows, inbound_flows=view.inbound_flows),
        model.load_s(fetch_tokens - ssd_tokens, ssd=False),
    )
    if ssd_tokens:
        transfer_s = max(transfer_s, model.load_s(ssd_tokens, ssd=True))
    queue_s = view.load.queued_s
    prefill_s = model.prefill_s(ask.prompt_tokens, prefix_tokens)
    return PrefillEstimate(
        transfer_s + queue_s + prefill_s, queue_s, transfer_s, prefill_s, prefix_tokens, fetch_tokens, view
    )


def in_order(
    estimate: PrefillEstimate, order: QueueOrder, now_s: float, drain_s: float = 0.0
) -> PrefillEstimate:
    """An estimate for an instance where turns are taken in an order.

    Args:
        estimate: As if it came last, which is right where nobody waits.
        order: In which turns are taken.
        now_s: The moment.
        drain_s: Of the prefill, what keeps nobody behind it waiting (`CostModel.drain_s`).
    """
    view, transfer_s, prefill_s = estimate.view, estimate.transfer_s, estimate.prefill_s
    occupied_s = prefill_s - drain_s
    queue_s, behind = order.join(view.load, Waiting(now_s, int(occupied_s * 1e6), inf), now_s)
    return PrefillEstimate(
        transfer_s + queue_s + prefill_s, queue_s, transfer_s, prefill_s, estimate.prefix_tokens,
        estimate.fetch_tokens, view, occupied_s * behind,
    )  # fmt: skip


def exceeds_ratio(view: InstanceView, threshold: float) -> bool:
    """Whether best_len / prefix_len(i) > threshold, where best_len counts only what i can fetch.

    The ratio is infinite where the instance holds nothing of a prefix that it could fetch.
    """
    return (
        view.fetchable_tokens > view.hbm_tokens
        and view.fetchable_tokens > threshold * view.hbm_tokens
        and view.instance.fetch != "none"
    )


def rank_decode(ask: Ask, view: InstanceView, model: CostModel) -> tuple[bool, float]:
    """(overfull, TBT) with all that is promised to the instance and this request: cheap, for ranking many."""
    load = view.load
    batch = load.batch + load.arriving
    kv_tokens = load.kv_tokens + ask.prompt_tokens + ask.output_tokens
    return _overfull(view.instance, batch, kv_tokens), model.step_s(batch + 1, kv_tokens)


def estimate_decode(
    ask: Ask, view: InstanceView, model: CostModel, now_s: float, at_s: float
) -> DecodeEstimate:
    """A decode instance at the moment the request arrives there (now + TTFT): exact, for the few best."""
    load = decode_at(view.load, now_s, at_s)
    batch, kv_tokens, promised_kv_tokens = load
    need_tokens = ask.prompt_tokens + ask.output_tokens
    overfull = _overfull(view.instance, batch, promised_kv_tokens + need_tokens)
    return DecodeEstimate(overfull, model.step_s(batch + 1, kv_tokens + need_tokens), load)


def _overfull(instance: Instance, batch: int, kv_tokens: int) -> bool:
    """Whether one more than the batch, and the tokens with its own, are too many for an instance."""
    return 0 < instance.max_batch <= batch or 0 < instance.kv_capacity_tokens < kv_tokens


def may_pair(prefill: Instance, decode: Instance) -> bool:
    """Whether the KV that one computes can be decoded by the other: one model, revision, domain, connector.

    Topology domains bind only where both name one. An instance of role `both` without a connector can hand
    nothing over; it works alone.
    """
    if prefill.id == decode.id:
        return True
    return (
        prefill.revision == decode.revision
        and prefill.model == decode.model
        and prefill.connector == decode.connector
        and (
            prefill.topology_domain == decode.topology_domain
            or not prefill.topology_domain
            or not decode.topology_domain
        )
        and (prefill.connector != "" or (prefill.role is not _BOTH and decode.role is not _BOTH))
    )


def decode_partners(prefill: InstanceView, world: World) -> Sequence[InstanceView]:
    """The decode instances to which a prefill may be handed; empty when there is none.

    An instance of role `both` keeps what it prefilled: a hand-over could only add to it.
    """
    instance = prefill.instance
    if instance.role is _BOTH:
        return (prefill,)
    return [view for view in world.decode if may_pair(instance, view.instance)]


def pick_tied(tied: Sequence[T], chance: Chance) -> T:
    """One of several that are equally good, at random: always the first would pile work on it."""
    return tied[0] if len(tied) == 1 else tied[int(chance.random() * len(tied))]


def least_tbt(ask: Ask, candidates: Iterable[InstanceView], world: World, chance: Chance) -> InstanceView:
    """The decode instance with the least predicted TBT among those with room; ties at random."""
    cost = world.cost
    best: tuple[bool, float] = (True, float("inf"))
    tied: list[InstanceView] = []
    for view in candidates:
        rank = rank_decode(ask, view, cost.of(view.instance))
        if not tied or rank < best:
            best = rank
            tied = [view]
        elif rank == best:
            tied.append(view)
    return pick_tied(tied, chance)


def least_ttft(
    ask: Ask, estimates: Sequence[PrefillEstimate], world: World, chance: Chance
) -> tuple[PrefillEstimate, Sequence[InstanceView]]:
    """The prefill with the least predicted TTFT that has a partner, and its partners; ties at random.

    Raises:
        NoInstanceError: none has a partner.
    """
    left = estimates
    while left:
        best_s = min([estimate.ttft_s for estimate in left])
        chosen = pick_tied([estimate for estimate in left if estimate.ttft_s == best_s], chance)
        partners = decode_partners(chosen.view, world)
        if partners:
            return chosen, partners
        left = [estimate for estimate in left if estimate is not chosen]
    raise no_instance(world)


def no_instance(world: World) -> NoInstanceError:
    """The error for a world in which nothing can be placed, saying what is missing."""
    if not world.prefill:
        return NoInstanceError("no prefill instance is ready")
    if not world.decode:
        return NoInstanceError("no decode instance is ready")
    return NoInstanceError(
        f"none of {len(world.prefill)} prefill and {len(world.decode)} decode instances may work together: "
        "a pair needs one model, one revision, one connector and, where both name one, one topology domain"
    )


def compose(
    ask: Ask,
    world: World,
    prefill: PrefillEstimate,
    decode: InstanceView,
    *,
    estimates: Sequence[PrefillEstimate] = (),
    estimate: DecodeEstimate | None = None,
) -> Placement:
    """The placement of a chosen pair, with the TBT predicted for the moment of arrival (now + TTFT).

    Args:
        ask: The request.
        world: What was known.
        prefill: The chosen prefill.
        decode: The chosen decode instance; the prefill's own when it does both.
        estimates: All prefills looked at, kept in `considered` where `world.explain` is set; a policy that
            looks at none leaves it out.
        estimate: The chosen decode's estimate at arrival, where the policy has made one.
    """
    if estimate is None:
        estimate = estimate_decode(
            ask, decode, world.cost.of(decode.instance), world.now_s, world.now_s + prefill.ttft_s
        )
    chosen = prefill.view.instance
    considered: Sequence[Considered] = ()
    considered_decode: Sequence[ConsideredDecode] = ()
    if world.explain:
        cost = world.cost
        seen = estimates or [estimate_local(ask, view, cost.of(view.instance)) for view in world.prefill]
        considered = [_considered(each) for each in seen]
        considered_decode = [
            _considered_decode(ask, world, view, world.now_s + prefill.ttft_s) for view in world.decode
        ]
    return Placement(
        prefill=None if chosen is decode.instance or chosen.id == decode.instance.id else chosen,
        decode=decode.instance,
        prefix_tokens=prefill.prefix_tokens,
        fetch_tokens=prefill.fetch_tokens,
        queue_s=prefill.queue_s,
        transfer_s=prefill.transfer_s,
        prefill_s=prefill.prefill_s,
        ttft_s=prefill.ttft_s,
        tbt_s=estimate.tbt_s,
        arrival=estimate.load,
        considered=considered,
        considered_decode=considered_decode,
    )


def _considered(estimate: PrefillEstimate) -> Considered:
    return Considered(
        instance=estimate.view.instance.id,
        prefix_tokens=estimate.prefix_tokens,
        fetch_tokens=estimate.fetch_tokens,
        queue_s=estimate.queue_s,
        transfer_s=estimate.transfer_s,
        prefill_s=estimate.prefill_s,
        ttft_s=estimate.ttft_s,
        delay_s=estimate.delay_s,
    )


def _considered_decode(ask: Ask, world: World, view: InstanceView, at_s: float) -> ConsideredDecode:
    found = estimate_decode(ask, view, world.cost.of(view.instance), world.now_s, at_s)
    return ConsideredDecode(view.instance.id, found.load.batch, found.load.kv_tokens, found.tbt_s)
