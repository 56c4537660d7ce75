"""Heads of HTTP/1.1 messages as bytes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()


def header(name: bytes, value: bytes) -> bytes:
    """One header line. The value must be free of line breaks: parsers on both sides guarantee it."""
    return b"%b: %b\r\n" % (name, value)


def answer_head(
    status: int, content_type: bytes, length: int | None, *, extra: bytes = b"", keep_alive: bool = True
) -> bytes:
    """Head of an answer; without a length its body is chunked."""
    framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    close = b"" if keep_alive else b"connection: close\r\n"
    return b"%bcontent-type: %b\r\n%b\r\n%b%b\r\n" % (
        status_line(status), content_type, framing, extra, close,
    )  # fmt: skip


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; empty data would end the body and is never framed."""
    return b"%x\r\n%b\r\n" % (len(data), data)
