"""Requests out of bytes: what is let pass of HTTP/1.1, and within which bounds (RFC 9112)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, cast

import httptools
import msgspec

from mooncake_scheduler.gateway.http1 import heads
from mooncake_scheduler.gateway.http1.exchange import Exchange

if TYPE_CHECKING:
    from mooncake_scheduler.gateway.http1.connection import ServerConnection

_ONCE: Final = frozenset({b"host", b"authorization"})
"""Headers that mean nothing when sent twice: who stands in front of this server may have read the other."""


class ServerLimits(msgspec.Struct, frozen=True):
    """Bounds of one connection."""

    header_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    reading_s: float = 60.0
    """Wall seconds a client may take to send one request."""
    idle_s: float = 75.0
    """Wall seconds a connection is kept without a request, or with an answer that is not being read."""


class RefusedError(Exception):
    """The bytes of a client are no request that is taken.

    Args:
        status: of the answer.
        message: what is wrong.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestReader(asyncio.Protocol):
    """Reads requests; a connection says what becomes of them.

    Args:
        limits: bounds of a request.
    """

    __slots__ = (
        "_body",
        "_coming",
        "_discard",
        "_headed",
        "_header_bytes",
        "_limits",
        "_parser",
        "_size",
        "_stuck_at",
        "_stuck_bytes",
        "_target",
        "_upgrading", "since_s",
    )  # fmt: skip

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._coming: Exchange | None = None
        self._target = b""
        self._body: bytes | bytearray = b""
        self._size = 0
        self._header_bytes = 0
        self._headed = False
        """The head of the request that is coming in is whole."""
        self._discard = False
        """It is answered already: its body is thrown away."""
        self._upgrading = False
        """Its head is about to be read again, without what it would rather speak."""
        self._stuck_at: tuple[Exchange, int] | None = None
        """How far the request had come when bytes were last read of it."""
        self._stuck_bytes = 0
        """What came since without bringing it any further."""
        self.since_s = time.monotonic()
        """When the connection became idle or its end began, or the request that is coming in began."""

    def _head_came(self) -> None:
        """The head of `_coming` is whole."""
        raise NotImplementedError

    def _whole_came(self, exchange: Exchange) -> None:
        """A request is whole."""
        raise NotImplementedError

    def _feed(self, data: bytes) -> None:
        """Read what came.

        Raises:
            RefusedError: it is not taken; what follows cannot be understood.
        """
        while data:
            try:
                self._parser.feed_data(data)
                if self._coming is not None:
                    self._look_for_progress(self._coming, len(data))
                return
            except httptools.HttpParserUpgrade as upgrade:
                # A server may go on in HTTP/1.1 (RFC 9110 §7.8); clients that would rather speak h2c count on
                # it. The parser takes what follows for another protocol: it is told the head again without.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                # An exception of a callback, such as a limit, arrives wrapped.
                if isinstance(error.__context__, RefusedError):
                    raise error.__context__ from None
                raise RefusedError(400, "this is not a valid HTTP/1.1 request") from error

    def _look_for_progress(self, coming: Exchange, fed_bytes: int) -> None:
        """Refuse what never ends: a header, a trailer or the line before a chunk.

        The parser tells of a header when it is whole, and keeps what it has of it until then.
        """
        reached = coming, len(self._target) + self._header_bytes + self._size
        if reached != self._stuck_at:
            self._stuck_at, self._stuck_bytes = reached, 0
            return
        self._stuck_bytes += fed_bytes
        most = self._limits.header_bytes
        if self._stuck_bytes > most:
            raise RefusedError(431, f"a header, or the line before a chunk, is longer than {most} bytes")

    # -- httptools

    def on_message_begin(self) -> None:
        self._coming = Exchange(cast("ServerConnection", self))
        self._target = self._body = b""
        self._size = self._header_bytes = 0
        self._headed = self._discard = self._upgrading = False
        self.since_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.header_bytes:
            raise RefusedError(414, "the request target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._limits.header_bytes:
            raise RefusedError(431, f"the headers are larger than {self._limits.header_bytes} bytes")
        if self._headed:
            # A trailer: whoever let the head pass has not seen it.
            return
        headers = cast("Exchange", self._coming).headers
        name = name.lower()
        if headers.setdefault(name, value) is not value and name in _ONCE:
            raise RefusedError(400, f"the header {name.decode().title()} is sent more than once")

    def on_headers_complete(self) -> None:
        exchange = cast("Exchange", self._coming)
        parser = self._parser
        self._headed = True
        exchange.method = parser.get_method()
        exchange.keep_alive = parser.should_keep_alive()
        exchange.version = version = parser.get_http_version()
        if exchange.method == b"CONNECT":
            raise RefusedError(501, "this is no proxy: CONNECT is not offered")
        if b"upgrade" in exchange.headers and parser.should_upgrade():
            self._upgrading = True
            return
        target = self._target
        if target[:1] != b"/":
            target = _origin_form(target)
        exchange.path, _, exchange.query = target.partition(b"?")
        headers = exchange.headers
        if version == "1.1":
            if b"host" not in headers:
                raise RefusedError(400, "the header Host is missing")
        elif version == "1.0":
            if b"transfer-encoding" in headers:
                # HTTP/1.0 has no chunks: who else looked at this may see its end elsewhere (RFC 9112 §6.1).
                exchange.keep_alive = False
        else:
            raise RefusedError(505, "speak HTTP/1.1")
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            raise RefusedError(413, f"the body is larger than {self._limits.body_bytes} bytes")
        self._head_came()

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limits.body_bytes:
            raise RefusedError(413, f"the body is larger than {self._limits.body_bytes} bytes")
        if self._discard:
            return
        if not self._body:
            self._body = data
            return
        # Not a list of pieces: they may be of one byte, each an object.
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += data

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        exchange, self._coming = cast("Exchange", self._coming), None
        body, self._body = self._body, b""
        exchange.body = body if isinstance(body, bytes) else bytes(body)
        self._whole_came(exchange)

    def _head_without_upgrade(self) -> bytes:
        exchange = cast("Exchange", self._coming)
        kept = [
            heads.header(name, value)
            for name, value in exchange.headers.items()
            if name not in (b"upgrade", b"http2-settings", b"connection")
        ]
        if not exchange.keep_alive:
            kept.append(b"connection: close\r\n")
        first = b"%b %b HTTP/%b\r\n" % (exchange.method, self._target, exchange.version.encode())
        return b"%b%b\r\n" % (first, b"".join(kept))


def _origin_form(target: bytes) -> bytes:
    """The path of a target sent as a whole URL, which servers have to take (RFC 9112 §3.2.2)."""
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        return target
    path_at = rest.find(b"/")
    return rest[path_at:] if path_at >= 0 else b"/"
