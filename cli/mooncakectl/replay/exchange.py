"""One streamed completion over a connection of its own, with the time of every event.

Made to be cheap, for the machine it runs on often carries the servers too: nothing of the stream is parsed
but the HTTP framing and the ends of events. A connection is never used twice: a request that got no answer
is then certainly one that the server lost, not one that met a connection closed in idleness.
"""

from __future__ import annotations

import asyncio
import ssl
from enum import StrEnum
from time import monotonic
from typing import Final, NamedTuple, cast

import httptools

_DONE: Final = b"data: [DONE]"
_DATA: Final = b"data:"
_MAX_ERROR_BODY_BYTES: Final = 65_536
_AFTER_DONE_S: Final = 5.0


class Ending(StrEnum):
    """How an exchange came to its end."""

    COMPLETE = "complete"
    """The server ended its answer (what it says may still be an error)."""
    CUT = "cut"
    """The connection broke before the answer was complete."""
    TIMEOUT = "timeout"
    NO_CONNECTION = "no_connection"
    NOT_HTTP = "not_http"


class Answer(NamedTuple):
    """What came back. Times are those of `time.monotonic`: an event loop's may tick by milliseconds only."""

    ending: Ending
    status: int | None
    """None when no status line arrived."""
    body: bytes
    """Of an answer other than 200, cut at 64 KiB."""
    started_s: float
    ended_s: float
    event_times_s: list[float]
    """Arrival of each `data:` event of a 200 answer, without the final [DONE]."""
    last_events: tuple[bytes, bytes]
    """The data of the last two events, older first; empty where there were fewer."""
    done: bool
    """Whether [DONE] arrived."""


class Endpoint(NamedTuple):
    """Where to connect."""

    host: str
    port: int
    tls: ssl.SSLContext | None


async def exchange(endpoint: Endpoint, request: list[bytes], timeout_s: float) -> Answer:
    """Send a whole HTTP request and collect the answer; never raises for what the server or network does."""
    loop = asyncio.get_running_loop()
    protocol = _Exchange(loop, request)
    try:
        async with asyncio.timeout(timeout_s):
            try:
                await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port, ssl=endpoint.tls)
            except OSError:
                return protocol.answer(Ending.NO_CONNECTION)
            return protocol.answer(await protocol.ended)
    except TimeoutError:
        return protocol.answer(Ending.TIMEOUT)
    finally:
        protocol.close()


class _Exchange(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, request: list[bytes]) -> None:
        self._loop = loop
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._started_s = self._now_s = monotonic()
        self._status: int | None = None
        self._body = b""
        self._times_s: list[float] = []
        self._last = self._before_last = b""
        self._done = False
        self._tail = b""
        self.ended: asyncio.Future[Ending] = loop.create_future()

    def answer(self, ending: Ending) -> Answer:
        return Answer(
            ending=ending,
            status=self._status,
            body=self._body,
            started_s=self._started_s,
            ended_s=monotonic() if ending is Ending.TIMEOUT else self._now_s,
            event_times_s=self._times_s,
            last_events=(self._before_last, self._last),
            done=self._done,
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.ended.cancel()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines(self._request)
        self._request = []

    def data_received(self, data: bytes) -> None:
        self._now_s = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(Ending.NOT_HTTP)

    def connection_lost(self, error: Exception | None) -> None:
        self._now_s = monotonic()
        # An answer without a length ends with its connection.
        self._end(Ending.COMPLETE if self._done and error is None else Ending.CUT)

    # The HTTP parser's side.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._body = (self._body + body)[:_MAX_ERROR_BODY_BYTES]
            return
        if self._tail:
            body = self._tail + body
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        start = 0
        end = body.find(b"\n\n")
        while end >= 0:
            self._event(body[start:end])
            start = end + 2
            end = body.find(b"\n\n", start)
        self._tail = body[start:]

    def on_message_complete(self) -> None:
        self._end(Ending.COMPLETE)

    def _event(self, event: bytes) -> None:
        if not event.startswith(_DATA):
            # A comment, or an event with a name before its data.
            event = event[event.find(b"\ndata:") + 1 :]
        if event.startswith(_DONE):
            self._done = True
            # A server that forgets to end its answer after that has said all the same.
            self._loop.call_later(_AFTER_DONE_S, self._end, Ending.COMPLETE)
        elif event.startswith(_DATA):
            self._times_s.append(self._now_s)
            self._before_last, self._last = self._last, event

    def _end(self, ending: Ending) -> None:
        if not self.ended.done():
            self.ended.set_result(ending)
