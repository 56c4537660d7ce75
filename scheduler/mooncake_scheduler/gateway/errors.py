"""Answers for what goes wrong, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import msgspec

from mooncake_core.ledger import RefusalReason
from mooncake_scheduler.conductor.model import Refused, World
from mooncake_scheduler.gateway.http1.heads import header


@dataclass(eq=False)
class ErrorAnswer(Exception):
    """An answer that says what is wrong. Raised by whoever finds out, sent by whoever holds the exchange."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    ttft_s: float | None = None
    """What was predicted, on a refusal."""
    tbt_s: float | None = None
    refused: Refused | None = None
    """The Conductor's refusal, where this is one."""
    world: World | None = None
    """What it was decided on."""
    challenge: bool = False
    """Tell that a bearer key is expected."""
    allow: bytes = b""
    """Methods that the path takes."""

    def body(self) -> bytes:
        """The JSON body."""
        error: dict[str, object] = {
            "message": self.message, "type": self.type, "param": self.param, "code": self.code,
        }  # fmt: skip
        if self.ttft_s is not None:
            error["predicted"] = {"ttft_s": round(self.ttft_s, 6), "tbt_s": round(self.tbt_s or 0.0, 6)}
        return msgspec.json.encode({"error": error})

    def header_lines(self) -> bytes:
        """Extra header lines."""
        lines = b""
        if self.retry_after_s is not None:
            lines += header(b"retry-after", b"%d" % self.retry_after_s)
        if self.allow:
            lines += header(b"allow", self.allow)
        if self.challenge:
            lines += header(b"www-authenticate", b"Bearer")
        return lines

    def event(self) -> bytes:
        """As the end of a stream that has begun: an error event, then the end mark."""
        return b"data: %b\n\ndata: [DONE]\n\n" % self.body()


def bad_request(message: str, param: str | None = None) -> ErrorAnswer:
    """400: the client's own mistake."""
    return ErrorAnswer(400, message, param=param)


def upstream_failed(message: str, code: str = "engine_failed", status: int = 502) -> ErrorAnswer:
    """The engines could not serve the request."""
    return ErrorAnswer(status, message, "server_error", code)


def no_instance(retry_after_s: int = 1) -> ErrorAnswer:
    """503: nothing can serve the request now."""
    return ErrorAnswer(
        503, "no instance can serve this request now: try again", "server_error", "no_instance",
        retry_after_s=retry_after_s,
    )  # fmt: skip


def overloaded(refused: Refused, world: World, time_scale: float) -> ErrorAnswer:
    """429: admitted, the request would miss its targets or make others miss theirs.

    Args:
        refused: why; times are model seconds.
        world: what it was decided on.
        time_scale: model seconds per wall second; Retry-After is wall seconds, at least 1.
    """
    reason, retry_after_s = refused.reason, refused.retry_after_s / time_scale
    return ErrorAnswer(
        429, _REFUSALS[reason], "overloaded", str(reason), retry_after_s=max(1, ceil(retry_after_s)),
                ttft_s=refused.ttft_s,
        tbt_s=refused.tbt_s,
        refused=refused,
        world=world,

    )  # fmt: skip


_REFUSALS = {
    RefusalReason.TTFT: "the first token would come later than the target allows: try again later",
    RefusalReason.TBT: "tokens would come more slowly than the target allows: try again later",
    RefusalReason.KV_MEMORY: "the KV cache has no room for this request: try again later",
    RefusalReason.TENANT_QUOTA: "this key has used up its share: try again later",
}


def plain_error_body(status: int, message: str) -> bytes:
    """Body for answers below the level of requests (bad HTTP, limits)."""
    return ErrorAnswer(status, message).body()
