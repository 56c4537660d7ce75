"""The words of the Conductor: what it is asked, what it knows, what it answers. No I/O, no clock, no chance.

All durations are seconds of the shared clock (model seconds where engines are simulated faster than life).
Structs rather than dataclasses: frozen ones are made ten times as fast, and a request needs a dozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import inf
from typing import Protocol

import msgspec

from mooncake_core.ledger import InstanceLoad, RefusalReason
from mooncake_core.ledger.contract import BUCKET_S
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.prediction import DecodeLoad


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as placing it needs to know."""

    id: str
    prompt_tokens: int
    output_tokens: int
    """Predicted output: `max_tokens`, or what was learned for the tenant and prompt-length class."""
    tenant: str = "default"
    priority: int = 0


class InstanceView(msgspec.Struct, frozen=True, gc=False):
    """One instance at the moment of the decision."""

    instance: Instance
    load: InstanceLoad
    hbm_tokens: int = 0
    """Tokens of this prompt's prefix in its HBM."""
    fetchable_tokens: int = 0
    """Tokens of the prefix it would hold after fetching what its source (`fetch`) has; >= hbm_tokens."""
    fetch_ssd_tokens: int = 0
    """Of the part that it would fetch, tokens that lie on SSD; the others are in DRAM."""
    inbound_flows: int = 0
    """Transfers already entering it."""
    source_flows: int = 0
    """Transfers already leaving the source it would fetch from."""


class Slo(msgspec.Struct, frozen=True, gc=False):
    """Targets in seconds; None = no target."""

    ttft_s: float | None = None
    tbt_s: float | None = None


class World(msgspec.Struct, frozen=True, gc=False):
    """All that is known at one moment: what a policy may look at, and nothing else."""

    now_s: float
    prefill: Sequence[InstanceView]
    """Those that can prefill: roles prefill and both; routable ones only."""
    decode: Sequence[InstanceView]
    cost: CostModels
    slo: Slo = Slo()
    explain: bool = False
    """Keep every candidate in the placement (`considered`); costs a few µs a candidate."""


def view_of(instance: Instance, *lists: Sequence[InstanceView]) -> InstanceView:
    """The view of an instance in the world it was chosen from.

    Raises:
        LookupError: it is in none of the lists.
    """
    for views in lists:
        for view in views:
            if view.instance is instance or view.instance.id == instance.id:
                return view
    raise LookupError(f"{instance.id} is not in the world that it was chosen from")


class Considered(msgspec.Struct, frozen=True, gc=False):
    """A candidate as it was seen: kept for `explain`."""

    instance: str
    prefix_tokens: int
    fetch_tokens: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    delay_s: float = 0.0
    """What it would make others wait longer, added up."""


class ConsideredDecode(msgspec.Struct, frozen=True, gc=False):
    """A decode candidate as it is predicted for the moment the request arrives there (now + TTFT)."""

    instance: str
    batch: int
    """Requests decoding there by then, without this one."""
    kv_tokens: int
    tbt_s: float
    """With this request in the batch."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The chosen pair and what is predicted for it."""

    prefill: Instance | None
    """None: the decode instance prefills itself (role both, or conditional disaggregation)."""
    decode: Instance
    prefix_tokens: int
    """Tokens of the prompt that need no computing (local and fetched)."""
    fetch_tokens: int
    """Of these, tokens that are fetched from the store or a peer."""
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    tbt_s: float
    """Predicted for the moment of arrival at decode (now + TTFT), this request in the batch."""
    arrival: DecodeLoad | None = None
    """What the decode instance is predicted to carry at that moment, without this request."""
    wait_s: float = 0.0
    """From then until there is a place to decode; the first token comes so much after `ttft_s`."""
    considered: Sequence[Considered] = ()
    considered_decode: Sequence[ConsideredDecode] = ()
    promised_ttft_s: float = inf
    """Within which the prefill ends whoever comes after it, as long as nothing fails; inf = not promised."""


class Stage(StrEnum):
    """A stage that checks for itself when it starts, where nothing was decided at arrival (mode `none`)."""

    PREFILL = "prefill"
    DECODE = "decode"


class Refused(msgspec.Struct, frozen=True, gc=False):
    """Not admitted: why, what was predicted, and when it is worth trying again."""

    reason: RefusalReason
    ttft_s: float
    tbt_s: float
    retry_after_s: float
    placement: Placement | None = None

    @classmethod
    def of(cls, placement: Placement, reason: RefusalReason, wait_s: float, tbt_s: float) -> Refused:
        """The refusal of a placement; nobody is told to come back sooner than loads are told apart."""
        return cls(reason, placement.ttft_s, tbt_s, max(wait_s, BUCKET_S), placement)


class NoInstanceError(Exception):
    """Nothing can serve the request now: no prefill, no decode, or no pair of one revision and domain."""


class Chance(Protocol):
    """Where a policy takes its chance from, so that the same seed gives the same decisions."""

    def random(self) -> float:
        """A number in [0, 1)."""


class Policy(Protocol):
    """A way of placing requests: one class, one method."""

    @property
    def name(self) -> str:
        """Its name in manifests and on the command line."""

    def place(self, ask: Ask, world: World, chance: Chance) -> Placement:
        """Choose the pair.

        Raises:
            NoInstanceError: there is no candidate, or no pair that may work together.
        """


class OrderingPolicy(Policy, Protocol):
    """A policy under which prefills take turns in an order of its own; else as they came."""

    @property
    def order(self) -> QueueOrder | None:
        """Where a prefill comes in its instance's queue; None = last."""


class ProposingPolicy(Policy, Protocol):
    """A policy with second thoughts: where its first choice is refused, another pair may be admitted."""

    def propose(self, ask: Ask, world: World, chance: Chance) -> Iterator[Placement]:
        """Placements, best first; `place` is the first of them.

        The order must not depend on `world.slo`, except that a tighter target may leave some out: then no
        tighter target ever turns a refusal into an admission.

        Raises:
            NoInstanceError: as `place`, when the first is asked for.
        """
