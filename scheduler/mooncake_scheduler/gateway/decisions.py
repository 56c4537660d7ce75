"""The last decisions, kept for `explain`: who was considered, what was predicted, what was measured."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import msgspec

from mooncake_core.ledger import RefusalReason
from mooncake_scheduler.conductor.model import Ask, Placement, World

KEEP = 2048


class Decision(msgspec.Struct, eq=False):
    """One request as it went. Times are model seconds; None = not reached."""

    request_id: str
    at_s: float
    """Unix seconds times the cluster's time scale."""
    tenant: str
    path: str
    ask: Ask | None = None
    world: World | None = None
    placement: Placement | None = None
    attempts: int = 0
    moves: int = 0
    """How often it was moved to another prefill instance while it waited for its turn."""
    refused: RefusalReason | None = None
    outcome: str = ""
    streamed: bool = False
    """The client saw each token as it came; else `ttft_s` is when the prefill leg had computed the first."""
    index: str = ""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    held_s: float | None = None
    """Its prefill waited for its turn; part of `ttft_s`."""
    prefill_s: float | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None
    decode_wait_s: float | None = None
    """For which it waited for a place to decode once its prompt was computed; None = it did not wait."""
    transfer_s: float | None = None
    """From the hand-over of staged KV to the first token of decode."""
    total_s: float | None = None


class Decisions:
    """A bounded memory of decisions by request id, the oldest forgotten first."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._kept: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision) -> None:
        """Remember a decision; of one id used twice the last counts."""
        kept = self._kept
        kept[decision.request_id] = decision
        if len(kept) > self._keep:
            kept.popitem(last=False)

    def get(self, request_id: str) -> Decision | None:
        """The decision on a request; None when it is not known or forgotten."""
        return self._kept.get(request_id)

    def latest(self, limit: int) -> list[Decision]:
        """The last decisions, newest first."""
        return list(islice(reversed(self._kept.values()), limit))
