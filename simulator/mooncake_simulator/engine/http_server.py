"""A small HTTP/1.1 server on httptools: cheap enough for thousands of streamed chunks a second.

Requests of one connection are answered one after the other. A stream's chunks are written by whoever has
them, without a task or a queue in between.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qsl, unquote, urlsplit

import httptools
import msgspec

LOG = logging.getLogger(__name__)

Headers = Mapping[str, str]


class Request:
    """One request, read to its end."""

    __slots__ = ("body", "headers", "method", "path", "query")

    def __init__(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        parts = urlsplit(target)
        self.method = method
        self.path = unquote(parts.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.headers = headers
        """Names in lower case."""
        self.body = body


class Exchange:
    """The answering side of one request."""

    def __init__(self, transport: asyncio.Transport, keep_alive: bool) -> None:
        self.on_disconnect: Callable[[], None] | None = None
        """Called once when the client leaves before the answer has ended."""
        self.ended = asyncio.Event()
        self._transport = transport
        self._keep_alive = keep_alive
        self._started = False

    @property
    def started(self) -> bool:
        """Whether the status line has been sent."""
        return self._started

    def json(self, value: object, status: int = 200, headers: Headers | None = None) -> None:
        """Answer with a JSON document."""
        self.respond(msgspec.json.encode(value), status, "application/json", headers)

    def respond(
        self, body: bytes, status: int = 200, content_type: str | None = None, headers: Headers | None = None
    ) -> None:
        """Answer with a whole body."""
        lines = dict(headers or {})
        lines["content-length"] = str(len(body))
        if content_type:
            lines["content-type"] = content_type
        self._started = True
        self._transport.write(self._head(status, lines) + body)
        self._end()

    def start_stream(self, content_type: str, headers: Headers | None = None) -> None:
        """Begin an answer whose body comes in chunks."""
        lines = {**(headers or {}), "content-type": content_type, "transfer-encoding": "chunked"}
        self._started = True
        self._transport.write(self._head(200, lines))

    def write(self, data: bytes) -> None:
        """Send a piece of a streamed body; nothing happens once the answer has ended."""
        if not self.ended.is_set():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """End a streamed body."""
        if not self.ended.is_set():
            self._transport.write(b"0\r\n\r\n")
            self._end()

    def drop(self) -> None:
        """Break the connection, as a dying process does."""
        self._transport.abort()
        self.ended.set()

    def client_left(self) -> None:
        """Told by the connection when it was closed."""
        if not self.ended.is_set():
            self.ended.set()
            if self.on_disconnect is not None:
                self.on_disconnect()

    def _end(self) -> None:
        self.ended.set()
        if not self._keep_alive:
            self._transport.close()

    def _head(self, status: int, headers: Headers) -> bytes:
        lines = [_status_line(status), "date: ", formatdate(usegmt=True), "\r\nserver: uvicorn\r\n"]
        for name, value in headers.items():
            lines += (name, ": ", value, "\r\n")
        if not self._keep_alive:
            lines.append("connection: close\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1")


Handler = Callable[[Request, Exchange], Awaitable[None]]


@functools.cache
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"


class _Connection(asyncio.Protocol):
    """Parses one client's requests and hands them to the handler in order."""

    def __init__(self, handler: Handler, connections: set[_Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._queue: asyncio.Queue[tuple[Request, bool]] = asyncio.Queue()
        self._exchange: Exchange | None = None
        self._worker: asyncio.Task[None] | None = None
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._worker = asyncio.get_running_loop().create_task(self._serve())

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._exchange is not None:
            self._exchange.client_left()
        if self._worker is not None:
            self._worker.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.transport.close()
        except httptools.HttpParserError:
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = {}
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        request = Request(method, self._target.decode("latin-1"), self._headers, b"".join(self._body))
        self._queue.put_nowait((request, self._parser.should_keep_alive()))

    async def _serve(self) -> None:
        while True:
            request, keep_alive = await self._queue.get()
            exchange = self._exchange = Exchange(self.transport, keep_alive)
            try:
                await self._handler(request, exchange)
            except Exception:
                LOG.exception("%s %s failed", request.method, request.path)
                if exchange.started:
                    exchange.drop()
                else:
                    exchange.respond(b"Internal Server Error", 500, "text/plain; charset=utf-8")
            await exchange.ended.wait()
            self._exchange = None


class HttpServer:
    """A listening socket and its connections."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (the one chosen by the system for port 0).

        Raises:
            OSError: the address is in use or not of this machine.
        """
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self._handler, self._connections), host, port, backlog=2048
        )
        listening: socket.socket = self._server.sockets[0]
        return int(listening.getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.transport.close()
        await asyncio.sleep(0)
