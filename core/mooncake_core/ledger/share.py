"""What one incarnation has promised to one instance, as its peers get to know it.

Not compiled (ADR 15): it is decoded into, for which its annotations have to be as written.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Queued: TypeAlias = tuple[float, int]
"""(when it was reserved in seconds, predicted prefill in microseconds)"""
Ends: TypeAlias = tuple[tuple[int, int, int], ...]
"""(bucket, requests, KV tokens), by bucket"""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one incarnation has promised to one instance. Travels between schedulers as msgpack."""

    queue: tuple[Queued, ...] = ()
    """Prefills not finished, oldest first."""
    batch: int = 0
    arriving: int = 0
    kv_tokens: int = 0
    prefill_ends: Ends = ()
    decode_ends: Ends = ()
