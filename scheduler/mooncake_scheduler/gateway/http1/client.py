"""The engine side: calls and the connections that carry them, one request at a time on each.

Nothing here is awaited: an answer is told to a `Receiver` as it comes, so that bytes go from socket to socket
without a task in between.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import httptools

if TYPE_CHECKING:
    from mooncake_scheduler.gateway.http1.upstream import Upstream

CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_HEADER_BYTES = 64 << 10


class FaultKind(StrEnum):
    """What went wrong between gateway and engine."""

    CONNECT = "connect"
    """Not reached: the engine never saw the request."""
    BROKEN = "broken"
    """The connection ended before the answer did, or the answer was no HTTP."""


class Fault(NamedTuple):
    """A transport fault; the detail is for logs only, it may name addresses."""

    kind: FaultKind
    detail: str


class Receiver(Protocol):
    """Who is told of an answer as it comes: `head`, `body`…, then `end`; or `failed` at any moment."""

    def head(self, status: int, content_type: bytes, retry_after: bytes) -> None: ...

    def body(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def failed(self, fault: Fault) -> None: ...


class Call:
    """A request on its way; `abort` ends it, and its receiver hears no more."""

    __slots__ = ("_connecting", "_receiver", "_request", "_upstream", "connection", "paused")

    def __init__(self, upstream: Upstream, request: bytes, receiver: Receiver) -> None:
        self._upstream = upstream
        self._request = request
        self._receiver: Receiver | None = receiver
        self._connecting: asyncio.Task[None] | None = None
        self.connection: UpstreamConnection | None = None
        self.paused = False

    def abort(self) -> None:
        """Give the request up. The engine notices that the connection closed, and aborts on its side."""
        self._receiver = None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.call = None
            connection.abort()

    def pause(self) -> None:
        """Read no further."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Go on reading."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    # -- for the connection

    def send_on(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        connection.send(self, self._request)

    def connect(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        upstream = self._upstream
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(upstream), upstream.host, upstream.port, ssl=upstream.tls
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            # The last: a host that is none.
            self._connecting = None
            self.fail(Fault(FaultKind.CONNECT, f"{upstream.url}: {error or 'timed out'}"))
            return
        self._connecting = None
        self.send_on(connection)

    def head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        if self._receiver is not None:
            self._receiver.head(status, content_type, retry_after)

    def body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)

    def end(self) -> None:
        self.connection = None
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.end()

    def lost(self, detail: str, *, reused: bool, untouched: bool) -> None:
        self.connection = None
        if reused and untouched:
            # The engine closed an idle connection just as the request was written: it never read it.
            self.connect()
        else:
            self.fail(Fault(FaultKind.BROKEN, detail))

    def fail(self, fault: Fault) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.failed(fault)


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "_content_type", "_framed", "_headed", "_header_bytes", "_ignored", "_may_stay", "_parser",
        "_retry_after", "_reused", "_status", "_stuck_bytes", "_touched", "_transport", "_upstream", "_whole",
        "call", "idle_since_s",
    )  # fmt: skip

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.call: Call | None = None
        self.idle_since_s = 0.0
        self._reused = False
        self._touched = False
        """Something of the answer has come: the engine has read the request."""
        self._whole = False
        """The answer has ended."""
        self._may_stay = False
        """Another request may follow on this connection."""
        self._stuck_bytes = 0
        """That came since the head was whole, or something of the body.

        The parser keeps a header or a trailer until it is whole.
        """
        self._clear()

    def _clear(self) -> None:
        self._status = 0
        self._content_type = b""
        self._retry_after = b""
        self._header_bytes = 0
        self._framed = False
        self._headed = False
        self._ignored = False

    def send(self, call: Call, request: bytes) -> None:
        """Write a request; the answer goes to the call."""
        self.call = call
        self._clear()
        self._touched = self._whole = False
        self._stuck_bytes = 0
        if call.paused:
            self._transport.pause_reading()
        self._transport.write(request)

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    def abort(self) -> None:
        """Break off."""
        self._transport.abort()

    @property
    def usable(self) -> bool:
        """Whether another request may be written."""
        return not self._transport.is_closing()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._upstream.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.call is None:
            # Nothing was asked: what comes now would be taken for the answer to the next request.
            self._transport.abort()
            return
        self._touched = True
        if self._stuck_bytes > MAX_ANSWER_HEADER_BYTES:
            self._break_off("headers too large")
            return
        self._stuck_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._may_stay = False
            if not self._whole:
                # What a callback of ours did not take is wrapped.
                self._break_off(error.__context__ or error)
                return
        if self._whole:
            self._end()

    def _break_off(self, why: object) -> None:
        call, self.call = self.call, None
        self._transport.abort()
        if call is not None:
            call.lost(f"{self._upstream.url}: bad answer: {why}", reused=False, untouched=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.forget(self)
        call, self.call = self.call, None
        if call is None:
            return
        if self._headed and not self._framed and exc is None:
            call.end()
            return
        detail = f"{self._upstream.url}: {exc or 'closed'} before the answer's end"
        call.lost(detail, reused=self._reused, untouched=not self._touched)

    def _end(self) -> None:
        """The answer has ended, and all that came with it was looked at."""
        call, self.call = self.call, None
        if call is None:
            return
        # An engine that answered before it had read the whole request may read on, or never.
        if self._may_stay and not self._transport.get_write_buffer_size():
            self._reused = True
            if call.paused:
                self._transport.resume_reading()
            self._upstream.keep(self)
        else:
            self._transport.abort()
        call.end()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_ANSWER_HEADER_BYTES:
            raise ValueError("headers too large")
        name = name.lower()
        if name == b"content-type":
            self._content_type = value
        elif name == b"content-length" or name == b"transfer-encoding":
            self._framed = True
        elif name == b"retry-after":
            self._retry_after = value

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status < 200:
            self._ignored = True
            return
        self._headed = True
        self._stuck_bytes = 0
        if self._status in (204, 304):
            self._framed = True
        if self.call is not None:
            self.call.head(self._status, self._content_type, self._retry_after)

    def on_body(self, data: bytes) -> None:
        self._stuck_bytes = 0
        if self.call is not None:
            self.call.body(data)

    def on_message_complete(self) -> None:
        if self._ignored:
            self._clear()
        else:
            self._whole = True
            self._may_stay = self._framed and self._parser.should_keep_alive()
