"""An engine's failure as an answer to the client: its own words where they are the client's business."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from mooncake_scheduler.gateway.body import UNREADABLE
from mooncake_scheduler.gateway.errors import ErrorAnswer, upstream_failed
from mooncake_scheduler.gateway.lifecycle import Setback

if TYPE_CHECKING:
    from mooncake_scheduler.gateway.roster import Roster
    from mooncake_scheduler.gateway.sending import Failure

_MAX_PASSED_BYTES = 64 << 10
_WANTS_A_KEY = (401, 403, 407)


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: int | str | None = None
    param: str | None = None


class _Shaped(msgspec.Struct):
    error: _Error | None = None
    message: str = ""
    detail: object = None


_SHAPED = msgspec.json.Decoder(_Shaped)


def answer_to(failure: Failure, roster: Roster) -> ErrorAnswer:
    """The client's answer to a failure that could not be mended.

    A 4xx says what is wrong with the request, back-pressure says when to come back: both go on, rebuilt so
    that nothing but message, type, code and Retry-After passes, and no worker's address. Everything else is
    our own failure.
    """
    match failure.setback:
        case Setback.CLIENT_ERROR if failure.status in _WANTS_A_KEY:
            # Clients show theirs to the gateway: passed on, this would say that it is wrong.
            return upstream_failed(
                "the engine wants a key of its own: run engines without one", "engine_refused"
            )
        case Setback.CLIENT_ERROR | Setback.BACK_PRESSURE:
            return _passed_on(failure, roster)
        case Setback.DEADLINE:
            return upstream_failed("no engine answered in time", "deadline", 504)
        case Setback.CONNECT | Setback.BROKEN | Setback.GONE:
            return upstream_failed(
                "the engine could not be reached or broke off: try again", "engine_unreachable"
            )
        case Setback.SERVER_ERROR:
            return upstream_failed("the engine failed to serve the request: try again", "engine_failed")


def _passed_on(failure: Failure, roster: Roster) -> ErrorAnswer:
    busy = failure.setback is Setback.BACK_PRESSURE
    kind = "overloaded" if busy else "invalid_request_error"
    message = "the engines have no room for this request now: try again later" if busy else "bad request"
    code: str | None = "engine_busy" if busy else None
    param = None
    error = _read(failure.answer)
    if error is not None and error.message and not names_a_worker(error.message, roster):
        message = error.message
        kind = error.type or kind
        param = error.param
        code = str(error.code) if isinstance(error.code, str) else code
    retry_after = failure.retry_after.strip()
    seconds = int(retry_after) if retry_after.isdigit() and len(retry_after) < 9 else (1 if busy else None)
    return ErrorAnswer(failure.status, message, kind, code, param, seconds)


def _read(answer: bytes) -> _Error | None:
    if len(answer) > _MAX_PASSED_BYTES:
        return None
    try:
        shaped = _SHAPED.decode(answer)
    except UNREADABLE:
        return None
    if shaped.error is not None:
        return shaped.error
    if shaped.message:
        return _Error(shaped.message)
    return _Error(shaped.detail) if isinstance(shaped.detail, str) else None


def names_a_worker(text: str, roster: Roster) -> bool:
    """Whether a text names the address of an instance."""
    return any(
        address in text
        for member in roster.members.values()
        for address in (member.upstream.host, member.instance.url, member.instance.id)
    )
