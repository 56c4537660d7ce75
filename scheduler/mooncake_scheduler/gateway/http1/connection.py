"""One client's connection: requests are answered in order, one at a time.

What a client sends ahead waits, and past a bound its socket is no longer read. However quickly its requests
are answered, there is one in a turn of the loop, and none while it does not read what it was answered. A
client that leaves is noticed in every phase, because the socket goes on being read while its request is
served.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from mooncake_scheduler.gateway.http1 import heads
from mooncake_scheduler.gateway.http1.exchange import Exchange
from mooncake_scheduler.gateway.http1.reading import RefusedError, RequestReader

if TYPE_CHECKING:
    from mooncake_scheduler.gateway.http1.server import HttpServer

_log = structlog.get_logger(__name__)

_MAX_AHEAD = 8
"""Requests a client may have sent before their turn; with so many its socket is not read any more."""
_LINGER_S = 5.0
"""How long what a client still sends is read and dropped after its last answer."""
_NEXT_MAY_COME_S = 5.0
"""How long a connection is spared whose answer began before the end was announced and ended after: its client
was not told to go elsewhere, and its next request is on the way."""


class Handler(Protocol):
    """Who answers. Both methods are called from the loop and must not block."""

    def head(self, exchange: Exchange) -> bool:
        """The head has come; True = already answered, its body is then thrown away."""

    def request(self, exchange: Exchange) -> None:
        """The whole request has come: answer now or later. Only called after `head`."""


class ServerConnection(RequestReader):
    """One client's connection."""

    __slots__ = (
        "_ahead", "_answered", "_closing", "_deaf", "_met", "_owner", "_paused", "_transport",
        "_unread_seen_bytes", "_woken", "active", "spared_until_s",
    )  # fmt: skip

    def __init__(self, owner: HttpServer) -> None:
        super().__init__(owner.limits)
        self._owner = owner
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._ahead: deque[Exchange] = deque()
        self._met = False
        """The handler has seen the head of the request that is coming in."""
        self._deaf = False
        """What comes is read and dropped: it cannot be understood, or nobody will answer it."""
        self._closing = False
        self._paused = False
        """The client does not read what it was answered."""
        self._answered = False
        """A request of what is being read was answered at once: the others have to wait for their turn."""
        self._woken = False
        """`_serve_next` is about to be called."""
        self._unread_seen_bytes = 0
        """`unread_bytes` at the last look."""
        self.active: Exchange | None = None
        self.spared_until_s = 0.0

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
        if self._deaf:
            return
        self._answered = False
        try:
            self._feed(data)
        except RefusedError as refused:
            self._refuse(refused.status, str(refused))

    def pause_writing(self) -> None:
        self._paused = True
        active = self.active
        if active is not None:
            active.paused = True
            if active.stream is not None:
                active.stream.pause()

    def resume_writing(self) -> None:
        self._paused = False
        active = self.active
        if active is not None:
            active.paused = False
            if active.stream is not None:
                active.stream.resume()
        else:
            self._wake()

    # -- requests that come in

    def _head_came(self) -> None:
        self._met = False
        if self._closing or self._ahead or self.active is not None:
            return
        if self._answered or self._paused:
            self._wake()
        else:
            self._meet()

    def _whole_came(self, exchange: Exchange) -> None:
        if self._discard or self._closing:
            return
        if self._met or not (self._answered or self._paused or self._ahead or self.active is not None):
            self._serve(exchange, met=self._met)
            return
        self._ahead.append(exchange)
        if len(self._ahead) == _MAX_AHEAD:
            self._transport.pause_reading()
        if self.active is None:
            self._wake()

    # -- serving

    def _meet(self) -> None:
        """Show the head whose turn has come: whoever may not come in need not send a body first."""
        exchange = cast("Exchange", self._coming)
        self._met = True
        expects = (
            exchange.version == "1.1" and exchange.headers.get(b"expect", b"").lower() == b"100-continue"
        )
        self.active = exchange
        kept = exchange.keep_alive
        # A refused client may send its body all the same or not: where the next request begins is open.
        exchange.keep_alive = kept and not expects
        try:
            self._discard = self._owner.handler.head(exchange)
        except Exception:
            self._discard = True
            self._failed(exchange)
        if self._discard:
            return
        exchange.keep_alive = kept
        self.active = None
        if expects and not self._size:
            self.send(heads.CONTINUE)

    def _serve(self, exchange: Exchange, *, met: bool) -> None:
        self.active = exchange
        exchange.paused = self._paused
        handler = self._owner.handler
        try:
            if met or not handler.head(exchange):
                handler.request(exchange)
        except Exception:
            self._failed(exchange)

    def _failed(self, exchange: Exchange) -> None:
        """The handler has failed: without an answer the client would wait for ever."""
        _log.exception("a handler failed", path=exchange.path)
        if exchange.started and not exchange.ended:
            self.abort()
        elif not exchange.ended:
            exchange.keep_alive = False
            exchange.respond(500, self._owner.error_body(500, "the gateway failed: this is a bug"))

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
        self._answered = True
        self.since_s = time.monotonic()
        if self._owner.closing:
            self.spared_until_s = self.since_s + _NEXT_MAY_COME_S
        if not exchange.keep_alive:
            self._end()
        elif self._ahead or self._coming is not None:
            self._wake()

    def _wake(self) -> None:
        """Serve what waits from the loop: neither does it pile up on the stack nor keep others waiting."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve_next)

    def _serve_next(self) -> None:
        self._woken = False
        if self.active is not None or self._closing or self._paused:
            return
        if self._ahead:
            exchange = self._ahead.popleft()
            if len(self._ahead) == _MAX_AHEAD - 1:
                self._transport.resume_reading()
            self._serve(exchange, met=False)
        elif self._coming is not None and self._headed and not self._met:
            self._meet()

    def _refuse(self, status: int, message: str) -> None:
        """Say what is wrong with the bytes and close: where the next request would begin is not known."""
        self._deaf = True
        last = self._ahead[-1] if self._ahead else self.active
        if last is not None:
            # What came before is served first; what is wrong gets no answer but the end.
            last.keep_alive = False
            return
        if not (self._discard and self._coming is not None):
            body = self._owner.error_body(status, message)
            self.send(heads.answer_head(status, heads.JSON, len(body), keep_alive=False) + body)
        # Else the request that goes wrong has its answer already.
        self._end()

    def _end(self) -> None:
        """Say no more. A client that still writes would lose the answer to a reset, so it is heard out."""
        if self._closing:
            return
        if self._coming is None and not self._deaf:
            self.close()
            return
        self._deaf = self._closing = True
        self._ahead.clear()
        self.since_s = time.monotonic()
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def close(self) -> None:
        """Close after what is written has been sent."""
        if not self._closing:
            self.since_s = time.monotonic()
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Break the connection off."""
        self._closing = True
        self._transport.abort()

    def check_time(self, now_s: float) -> None:
        """Close when nothing has come for too long."""
        unread_bytes = self.unread_bytes
        if unread_bytes < self._unread_seen_bytes:
            # It reads, however slowly.
            self.since_s = now_s
        self._unread_seen_bytes = unread_bytes
        waited_s = now_s - self.since_s
        if self._closing:
            if waited_s > self._limits.idle_s:
                # Its last answer is not being read.
                self.abort()
        elif self.active is not None:
            return
        elif self._coming is not None:
            if waited_s > self._limits.reading_s:
                self._refuse(408, "the request did not arrive in time")
        elif waited_s > self._limits.idle_s:
            self.close()

    @property
    def unread_bytes(self) -> int:
        """What is written and has not found room at the client."""
        return self._transport.get_write_buffer_size()

    @property
    def idle(self) -> bool:
        """Nothing is being received or answered."""
        return self._closing or (self.active is None and self._coming is None and not self._ahead)
