"""What one incarnation has promised to one instance, as its peers get to know it.

Not compiled (ADR 15): it is decoded into, for which its annotations have to be as written.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

Queued: TypeAlias = tuple[float, int]
"""(when it was handed to its instance in seconds, predicted prefill in microseconds)"""


class Waiting(NamedTuple):
    """A prefill whose turn at its instance has not come: all that an order may look at, so that all agree."""

    reserved_s: float
    cost_us: int
    """Predicted microseconds of prefill."""
    latest_end_s: float
    """When it has to have ended, as promised; inf = nothing was promised."""


End: TypeAlias = tuple[int, int, int]
"""(bucket, requests, KV tokens)"""
Ends: TypeAlias = tuple[End, ...]
"""By bucket."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one incarnation has promised to one instance. Travels between schedulers as msgpack."""

    queue: tuple[Queued, ...] = ()
    """Prefills under way at the instance, in the order in which they were handed to it."""
    batch: int = 0
    arriving: int = 0
    kv_tokens: int = 0
    prefill_ends: Ends = ()
    decode_ends: Ends = ()
    waiting: tuple[Waiting, ...] = ()
    """Prefills that were not handed to it yet, by when they were reserved."""
    queued_tokens: int = 0
    """That the prefills not finished compute."""
