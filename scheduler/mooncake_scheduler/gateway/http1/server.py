"""The serving side: one protocol a connection, one exchange a request (`exchange`).

Requests of one connection are answered in order, one at a time. What a client sends ahead waits, and past a
bound its socket is no longer read. A client that leaves is noticed in every phase, because the socket goes
on being read while its request is served.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools
import msgspec

from mooncake_scheduler.gateway.http1 import heads
from mooncake_scheduler.gateway.http1.exchange import Exchange

_MAX_AHEAD = 8
"""Requests a client may have sent before their turn."""
_LINGER_S = 0.5
_NEXT_MAY_COME_S = 5.0
"""How long a connection is spared whose answer began before the end was announced and ended after: its client
was not told to go elsewhere, and its next request is on the way."""


class ServerLimits(msgspec.Struct, frozen=True):
    """Bounds of one connection."""

    header_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    reading_s: float = 60.0
    """Wall seconds a client may take to send one request."""
    idle_s: float = 75.0
    """Wall seconds a connection is kept without a request."""


class Handler(Protocol):
    """Who answers. Both methods are called from the loop and must not block."""

    def head(self, exchange: Exchange) -> bool:
        """The head has come; True = already answered, its body is then thrown away."""

    def request(self, exchange: Exchange) -> None:
        """The whole request has come: answer now or later."""


class ServerConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_ahead", "_body", "_closing", "_coming", "_discard", "_header_bytes", "_limits",
        "_owner", "_parser", "_size", "_target", "_transport", "active", "since_s", "spared_until_s",
    )  # fmt: skip

    def __init__(self, owner: HttpServer) -> None:
        self._owner = owner
        self._limits = owner.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._ahead: deque[Exchange] = deque()
        self._coming: Exchange | None = None
        self._target = b""
        self._body: list[bytes] = []
        self._size = 0
        self._header_bytes = 0
        self._discard = False
        self._closing = False
        self.active: Exchange | None = None
        self.spared_until_s = 0.0
        self.since_s = time.monotonic()
        """When the connection became idle, or the request that is coming in began."""

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._owner.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connections.discard(self)
        self._closing = True
        self._ahead.clear()
        active, self.active = self.active, None
        if active is not None:
            active.left = True
            if active.on_left is not None:
                active.on_left()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(501, "upgrading to another protocol is not offered: speak HTTP/1.1")
        except httptools.HttpParserError as error:
            # An exception of a callback, such as a limit, arrives wrapped.
            cause = error.__context__
            if isinstance(cause, _RefusedError):
                self._refuse(cause.status, str(cause))
            else:
                self._refuse(400, "this is not a valid HTTP/1.1 request")

    def pause_writing(self) -> None:
        active = self.active
        if active is not None:
            active.paused = True
            if active.stream is not None:
                active.stream.pause()

    def resume_writing(self) -> None:
        active = self.active
        if active is not None:
            active.paused = False
            if active.stream is not None:
                active.stream.resume()

    # -- httptools

    def on_message_begin(self) -> None:
        if len(self._ahead) >= _MAX_AHEAD:
            raise _RefusedError(400, "too many requests sent ahead on one connection")
        self._coming = Exchange(self)
        self._target = b""
        self._size = self._header_bytes = 0
        self._discard = False
        self.since_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.header_bytes:
            raise _RefusedError(414, "the request target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._limits.header_bytes:
            raise _RefusedError(431, f"the headers are larger than {self._limits.header_bytes} bytes")
        cast("Exchange", self._coming).headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        exchange = cast("Exchange", self._coming)
        parser = self._parser
        exchange.method = parser.get_method()
        exchange.keep_alive = parser.should_keep_alive()
        exchange.version = parser.get_http_version()
        exchange.path, _, exchange.query = self._target.partition(b"?")
        headers = exchange.headers
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            raise _RefusedError(413, f"the body is larger than {self._limits.body_bytes} bytes")
        expects = headers.get(b"expect", b"").lower() == b"100-continue"
        if self.active is None and not self._ahead:
            # Whoever may not come in need not send a body first.
            self.active = exchange
            kept = exchange.keep_alive
            # A refused client may send its body all the same or not: where the next request begins is open.
            exchange.keep_alive = kept and not expects
            self._discard = self._owner.handler.head(exchange)
            if self._discard:
                return
            exchange.keep_alive = kept
            self.active = None
            if expects:
                self.send(heads.CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limits.body_bytes:
            raise _RefusedError(413, f"the body is larger than {self._limits.body_bytes} bytes")
        if not self._discard:
            self._body.append(data)

    def on_message_complete(self) -> None:
        exchange, self._coming = cast("Exchange", self._coming), None
        if self._discard:
            return
        body = self._body
        exchange.body = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        if self.active is None and not self._ahead:
            self.active = exchange
            self._owner.handler.request(exchange)
        else:
            self._ahead.append(exchange)
            if len(self._ahead) == _MAX_AHEAD:
                self._transport.pause_reading()

    # -- for exchanges

    def send(self, data: bytes) -> None:
        """Write bytes to the client."""
        if not self._closing:
            self._transport.write(data)

    def stays(self, exchange: Exchange) -> bool:
        """Whether the connection is kept after this exchange."""
        if self._owner.closing or self._closing:
            exchange.keep_alive = False
        return exchange.keep_alive

    def answered(self, exchange: Exchange) -> None:
        """The answer has ended: serve what was sent ahead, wait for more, or close."""
        self.active = None
        self.since_s = time.monotonic()
        if self._owner.closing:
            self.spared_until_s = self.since_s + _NEXT_MAY_COME_S
        if not exchange.keep_alive:
            self.close()
        elif self._ahead:
            if len(self._ahead) == _MAX_AHEAD:
                self._transport.resume_reading()
            # From the loop, so that many waiting requests cannot pile up on the stack.
            asyncio.get_running_loop().call_soon(self._serve_next)

    def _serve_next(self) -> None:
        if self.active is None and self._ahead and not self._closing:
            self.active = exchange = self._ahead.popleft()
            if not self._owner.handler.head(exchange):
                self._owner.handler.request(exchange)

    def _refuse(self, status: int, message: str) -> None:
        """Say what is wrong with the bytes and close: where the next request would begin is not known."""
        if self.active is None:
            body = self._owner.error_body(status, message)
            self.send(heads.answer_head(status, heads.JSON, len(body), keep_alive=False) + body)
            # A client still writing would lose the answer to a reset: what it sends is read and dropped.
            self._closing = True
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)
        else:
            self.active.keep_alive = False
            self._ahead.clear()
            self._transport.pause_reading()

    def close(self) -> None:
        """Close after what is written has been sent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Break the connection off."""
        self._closing = True
        self._transport.abort()

    def check_time(self, now_s: float) -> None:
        """Close when nothing has come for too long."""
        if self.active is not None:
            return
        waited_s = now_s - self.since_s
        if self._coming is not None:
            if waited_s > self._limits.reading_s:
                self._refuse(408, "the request did not arrive in time")
        elif waited_s > self._limits.idle_s:
            self.close()

    @property
    def idle(self) -> bool:
        """Nothing is being received or answered."""
        return self.active is None and self._coming is None and not self._ahead


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """The listening socket and its connections.

    Args:
        handler: who answers.
        limits: bounds of each connection.
        error_body: makes the body of answers that no handler gives (bad HTTP, too large, too slow).
    """

    def __init__(
        self, handler: Handler, limits: ServerLimits, error_body: Callable[[int, str], bytes]
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.error_body = error_body
        self.connections: set[ServerConnection] = set()
        self.closing = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen (SO_REUSEPORT, so that processes can share a port); returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((host, port))
            listener.setblocking(False)
            self._server = await loop.create_server(
                lambda: ServerConnection(self), sock=listener, backlog=2048
            )
        except BaseException:
            listener.close()
            raise
        bound: int = listener.getsockname()[1]
        return bound

    def check_time(self, now_s: float) -> None:
        """Close connections that idle or send too slowly; call every second or so."""
        for connection in list(self.connections):
            connection.check_time(now_s)

    def announce_end(self) -> None:
        """Go on accepting, but let each answer say that it is the last of its connection.

        A kept connection that is closed in idleness may meet its client's next request half way, which is
        then lost; one whose client was told to close it cannot.
        """
        self.closing = True

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, let answers in progress end for at most `grace_s`, then break off the rest."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        deadline_s = time.monotonic() + grace_s
        while self.connections and time.monotonic() < deadline_s:
            now_s = time.monotonic()
            for connection in list(self.connections):
                if connection.idle and connection.spared_until_s < now_s:
                    connection.close()
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.abort()
        # One turn of the loop lets connection_lost run.
        await asyncio.sleep(0)
