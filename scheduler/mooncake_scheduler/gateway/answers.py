"""Answers of engines on their way to a client: untouched, but for what is looked at or cleaned. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from mooncake_scheduler.gateway.body import UNREADABLE

DONE: Final = b"data: [DONE]"
_END: Final = b"\n\n"
_ERROR: Final = b'data: {"error"'
_USAGE: Final = b'"usage":'
_MAX_HELD_BYTES: Final = 4 << 20


class EventStream:
    """Passes events through.

    Only whole events go on, so that a stream that breaks off can still be ended with an event of our own.
    Nearly always a piece ends where an event ends, and passes as it came.

    Args:
        cached_tokens: what `usage.prompt_tokens_details.cached_tokens` has to say (the prefill leg's figure);
            None = leave events as they are.
    """

    __slots__ = ("_cached_tokens", "_held", "_last", "_previous", "events")

    def __init__(self, cached_tokens: int | None = None) -> None:
        self._cached_tokens = cached_tokens
        self._held = b""
        self._last = b""
        self._previous = b""
        self.events = 0
        """Events passed."""

    def feed(self, data: bytes) -> bytes:
        """The bytes to send on for the bytes that came."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_END):
            end = data.rfind(_END)
            if end < 0 and len(data) < _MAX_HELD_BYTES:
                self._held = data
                return b""
            if end >= 0:
                data, self._held = data[: end + 2], data[end + 2 :]
        self.events += data.count(_END)
        self._previous = self._last
        self._last = data
        if self._cached_tokens is not None and _USAGE in data:
            return self._patched(data, self._cached_tokens)
        return data

    @property
    def ended(self) -> bool:
        """Whether the last event was the end mark."""
        return not self._held and self._last.rstrip().endswith(DONE)

    def last_usage(self) -> Usage | None:
        """Token counts of the last events, where they are told."""
        for event in reversed((self._previous + self._last).split(_END)):
            if _USAGE in event and event.startswith(b"data: "):
                try:
                    found = _CARRIER.decode(event[6:]).usage
                except UNREADABLE:
                    continue
                if found is not None:
                    return found
        return None

    def last_error(self) -> tuple[int, bytes] | None:
        """The error with which a stream ended whose engine said so itself; as `error_of`."""
        for event in (self._previous + self._last).split(_END):
            if event.startswith(_ERROR):
                return error_of(event)
        return None

    def _patched(self, data: bytes, cached_tokens: int) -> bytes:
        return _END.join([
            b"data: " + with_cached_tokens(event[6:], cached_tokens)
            if event.startswith(b"data: {") and _USAGE in event
            else event
            for event in data.split(_END)
        ])  # fmt: skip


def error_of(data: bytes) -> tuple[int, bytes] | None:
    """The error that a stream begins with: (status, the event's JSON); None when it begins with tokens.

    vLLM answers 200 before it knows, and then says what went wrong in the stream.
    """
    if not data.startswith(_ERROR):
        return None
    event = data[6:].partition(_END)[0]
    try:
        code = _ERROR_EVENT.decode(event).error.code
    except UNREADABLE:
        code = None
    return (code if isinstance(code, int) and 400 <= code <= 599 else 500), event


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage` of an OpenAI answer."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None when it does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Carrier(msgspec.Struct):
    usage: Usage | None = None


class _ErrorBody(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _ErrorBody


_CARRIER = msgspec.json.Decoder(_Carrier)
_ERROR_EVENT = msgspec.json.Decoder(_ErrorEvent)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def usage_of(answer: bytes) -> Usage | None:
    """Token counts of a whole answer, where it tells them."""
    try:
        return _CARRIER.decode(answer).usage
    except UNREADABLE:
        return None


def with_cached_tokens(answer: bytes, cached_tokens: int) -> bytes:
    """An answer whose usage says how many prompt tokens came from a cache; all else as it was.

    In a pair the decode engine counts the KV it was handed as cached: what was saved is what the prefill
    engine says.
    """
    try:
        fields = _FIELDS.decode(answer)
        usage_raw = fields.get("usage")
        if usage_raw is None or bytes(usage_raw) == b"null":
            return answer
        usage = _FIELDS.decode(usage_raw)
        details_raw = usage.get("prompt_tokens_details")
        details = {} if details_raw is None or bytes(details_raw) == b"null" else _FIELDS.decode(details_raw)
    except UNREADABLE:
        return answer
    details["cached_tokens"] = msgspec.Raw(b"%d" % cached_tokens)
    usage["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(details))
    fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(fields)


def without_kv_params(answer: bytes) -> bytes:
    """An answer without the hand-over's parameters, which name workers."""
    if b'"kv_transfer_params"' not in answer:
        return answer
    try:
        fields = _FIELDS.decode(answer)
    except UNREADABLE:
        return answer
    found = fields.get("kv_transfer_params")
    if found is None or bytes(found) == b"null":
        return answer
    fields["kv_transfer_params"] = msgspec.Raw(b"null")
    return msgspec.json.encode(fields)
