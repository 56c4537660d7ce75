"""A small real HTTP server that speaks OpenAI completions and misbehaves on demand.

    async with OpenAIServer(lambda request: Answer(die_after=3)) as server:
        ...  # server.url

It counts no tokens and knows no model: what a request gets is what the script says.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec


@dataclass
class Received:
    """A request as it came in."""

    index: int
    """Place among the completions asked for, from 0."""
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float


@dataclass
class Answer:
    """What to do with one request."""

    status: int = 200
    error: dict[str, Any] | None = None
    """The `error` object of an answer other than 200."""
    tokens: int | None = None
    """Events to stream; None: as many as `max_tokens`."""
    first_after_s: float = 0.0
    gap_s: float = 0.0
    cached_tokens: int | None = 0
    usage: bool = True
    finish_reason: str | None = "length"
    done: bool = True
    die_after: int | None = None
    """Reset the connection after so many events."""
    error_after: int | None = None
    """Send an error event and [DONE] after so many events."""
    raw: bytes | None = None
    """Send these bytes instead of any HTTP, then close."""
    hang: bool = False
    """Never answer."""
    crlf: bool = False
    """End lines as Windows does."""
    piece_bytes: int | None = None
    """Cut the stream into HTTP chunks of so many bytes, wherever events end."""


@dataclass
class OpenAIServer:
    """The server; `url` is where it listens once entered."""

    script: Callable[[Received], Answer] = lambda received: Answer()
    model: str = "scripted"
    time_scale: float | None = None
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    received: list[Received] = field(default_factory=list)
    url: str = ""
    most_at_once: int = 0

    async def __aenter__(self) -> Self:
        self._open: set[asyncio.Task[None]] = set()
        self._at_once = 0
        self._news = asyncio.Event()
        self._server = await asyncio.start_server(self._client, "127.0.0.1", 0, ssl=self.tls)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"{'https' if self.tls else 'http'}://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()

    async def until_received(self, count: int) -> None:
        """Wait until so many completions were asked for."""
        while len(self.received) < count:
            self._news.clear()
            await self._news.wait()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        start, *lines = head.strip().split("\r\n")
        method, path, _ = start.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            await self._json(writer, 401, {"error": {"message": "no key", "code": "invalid_api_key"}})
        elif method == "GET" and path == "/v1/models":
            await self._json(writer, 200, {"object": "list", "data": [self._model_entry()]})
        elif method == "POST" and path == "/v1/completions":
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            try:
                await self._complete(writer, path, headers, msgspec.json.decode(body))
            finally:
                self._at_once -= 1
        else:
            await self._json(writer, 404, {"error": {"message": path, "code": "not_found"}})

    def _model_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": self.model, "object": "model"}
        return entry | ({"mooncake": {"time_scale": self.time_scale}} if self.time_scale else {})

    async def _complete(
        self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        received = Received(len(self.received), path, headers, body, asyncio.get_running_loop().time())
        self.received.append(received)
        self._news.set()
        answer = self.script(received)
        if answer.hang:
            await asyncio.Event().wait()
        if answer.raw is not None:
            writer.write(answer.raw)
            await writer.drain()
            writer.close()
            return
        if answer.status != 200:
            await self._json(writer, answer.status, {"error": answer.error} if answer.error else {})
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        async for data in self._events(answer, body):
            if data is None:
                writer.transport.abort()
                return
            size = answer.piece_bytes or len(data)
            for place in range(0, len(data), size):
                piece = data[place : place + size]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                if answer.piece_bytes:
                    await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _events(self, answer: Answer, body: dict[str, Any]) -> AsyncIterator[bytes | None]:
        newline = b"\r\n" if answer.crlf else b"\n"

        def event(value: Any) -> bytes:
            data = value if isinstance(value, bytes) else msgspec.json.encode(value)
            return b"data: " + data + newline * 2

        count = body.get("max_tokens", 16) if answer.tokens is None else answer.tokens
        for number in range(count):
            if number == answer.die_after:
                yield None
                return
            if number == answer.error_after:
                yield event({"error": {"message": "broke", "type": "server_error", "code": "engine_died"}})
                yield event(b"[DONE]")
                return
            await asyncio.sleep(answer.first_after_s if number == 0 else answer.gap_s)
            finish = answer.finish_reason if number == count - 1 else None
            yield event({"choices": [{"index": 0, "text": "x", "finish_reason": finish}], "usage": None})
        if answer.usage:
            yield event({"choices": [], "usage": self._usage(answer, body, count)})
        if answer.done:
            yield event(b"[DONE]")

    @staticmethod
    def _usage(answer: Answer, body: dict[str, Any], count: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        if answer.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
        return usage

    @staticmethod
    async def _json(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = msgspec.json.encode(value)
        writer.write(
            b"HTTP/1.1 %d Scripted\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n%b" % (status, len(data), data)
        )
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
