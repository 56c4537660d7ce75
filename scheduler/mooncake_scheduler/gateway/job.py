"""One client request as data: what was asked, where it is, and what was measured."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from mooncake_core.index import Depth
from mooncake_scheduler.conductor.model import Ask, Placement
from mooncake_scheduler.conductor.prediction import DecodeLoad
from mooncake_scheduler.gateway import engines
from mooncake_scheduler.gateway.answers import Usage
from mooncake_scheduler.gateway.auth import Caller
from mooncake_scheduler.gateway.body import Body, Prompt, prompt_form
from mooncake_scheduler.gateway.decisions import Decision
from mooncake_scheduler.gateway.errors import bad_request
from mooncake_scheduler.gateway.flow import Flow
from mooncake_scheduler.gateway.http1 import Exchange
from mooncake_scheduler.gateway.lifecycle import Phase, may_follow

_NONE_PUT: Final[Mapping[str, bytes]] = {}
_NO_DEPTHS: Final[Mapping[str, Depth]] = {}
_NO_KEYS: Final = array("Q")


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What a body asks for, as far as the gateway looks at it."""

    body: Body
    model: str
    streams: bool
    max_tokens: int | None
    form: Prompt | None
    """None for chats and for prompts given as embeddings."""
    whole: bool
    """One engine has to serve it from start to end."""


def read_wish(data: bytes, *, chat: bool) -> Wish:
    """Read a body.

    Raises:
        ErrorAnswer: 400, naming the field.
    """
    body = Body(data)
    fields = body.fields
    limit = body.integer("max_completion_tokens") if "max_completion_tokens" in fields else None
    if limit is None and "max_tokens" in fields:
        limit = body.integer("max_tokens")
    engines.check_extra_arguments(body)
    form = None
    if chat:
        if body.raw("messages") is None:
            raise bad_request("messages: this field is required", "messages")
    else:
        prompt = body.raw("prompt")
        if prompt is not None:
            form = prompt_form(prompt)
        elif body.raw("prompt_embeds") is None:
            raise bad_request("prompt: this field is required", "prompt")
    return Wish(
        body=body,
        model=(body.text("model") or "") if "model" in fields else "",
        streams="stream" in fields and body.flag("stream"),
        max_tokens=limit if limit is not None and limit > 0 else None,
        form=form,
        whole=limit == 0 or engines.must_stay_whole(body, form),
    )


class Job:
    """A request on its way. Wall times are monotonic seconds.

    Args:
        exchange: the client's.
        caller: who asks.
        request_id: as the client knows it.
        engine_id: as engines know it; unique.
        head: header lines of the answer.
        decision: what is kept of it for `explain`.
        total_s: when the request's own deadline is.
    """

    __slots__ = (
        "ask", "cached_tokens", "caller", "decision", "depths", "engine_id", "events", "exchange", "first_s",
        "flow", "gaps_s", "handed_over_s", "head", "keys", "last_s", "load_at_first", "phase", "placement",
        "predicted_ttft_s",
        "prefill_done", "prefilled_s", "put", "received_s", "request_id", "reserved", "total_s", "usage",
        "wish",
    )  # fmt: skip

    flow: Flow
    wish: Wish
    ask: Ask

    def __init__(
        self,
        exchange: Exchange,
        caller: Caller,
        request_id: str,
        engine_id: str,
        head: bytes,
        decision: Decision,
        total_s: float,
    ) -> None:
        self.exchange = exchange
        self.caller = caller
        self.request_id = request_id
        self.engine_id = engine_id
        self.head = head
        self.decision = decision
        self.total_s = total_s
        self.received_s = time.monotonic()
        self.phase = Phase.RECEIVED
        self.put: Mapping[str, bytes] = _NONE_PUT
        """Fields that replace the client's in what engines get."""
        self.keys = _NO_KEYS
        self.depths: Mapping[str, Depth] = _NO_DEPTHS
        self.placement: Placement | None = None
        self.reserved: str | None = None
        """Id of the reservation held."""
        self.prefill_done = False
        """The ledger knows that the present reservation's prefill has ended."""
        self.predicted_ttft_s: float | None = None
        """Model seconds, as predicted when its turn came: from then on nobody overtakes it."""
        self.cached_tokens: int | None = None
        """What the prefill leg says."""
        self.usage: Usage | None = None
        self.first_s = 0.0
        """When the first token (of a stream) or the answer came; 0 = not yet."""
        self.last_s = 0.0
        self.prefilled_s = 0.0
        """When the prefill leg ended; 0 = there was none."""
        self.handed_over_s = 0.0
        """When decode was sent a stream whose KV is staged; 0 = not."""
        self.load_at_first: DecodeLoad | None = None
        """What the decode instance carried when the first token of a stream came, this request included."""
        self.gaps_s: Sequence[float] = ()
        """Wall seconds between the pieces of the stream."""
        self.events = 0

    def enter(self, phase: Phase) -> None:
        """Go to a phase."""
        assert may_follow(self.phase, phase), f"{self.phase.name} → {phase.name}"
        self.phase = phase

    @property
    def overdue(self) -> bool:
        """Its own deadline has passed."""
        return time.monotonic() >= self.total_s

    def unbind(self) -> None:
        """Its own deadline binds no more: its client has an answer, sees one come, or is gone."""
        self.total_s = inf

    def limit(self, seconds: float = inf) -> None:
        """The present wait may take so long, and never beyond the request's own deadline."""
        self.flow.deadline_s = min(time.monotonic() + seconds, self.total_s)
