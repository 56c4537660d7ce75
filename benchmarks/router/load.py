"""The load: a fixed number of requests over a fixed number of keep-alive connections, counted, not timed."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import cast

import httptools

from fake_engine import MODEL


@dataclass
class LoadResult:
    """What came back."""

    answered: int = 0
    errors: int = 0
    chunks: int = 0


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.chunks = 0
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        if not self.done.done():
            self.done.set_result(status)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("router closed the connection"))

    async def exchange(self, request: bytes) -> int:
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.done


def body(*, prompt: list[int] | str, stream: bool, max_tokens: int) -> bytes:
    """An OpenAI completion."""
    return json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "temperature": 0},
        separators=(",", ":"),
    ).encode()


def requests(
    count: int, *, body_bytes: int, stream: bool, max_tokens: int, seed: int, text: bool = False
) -> list[bytes]:
    """Distinct prompts sized so that a body has about `body_bytes` bytes; a third share their first half.

    A prompt is token ids, or with `text` the same numbers as words.
    """
    chance = random.Random(seed)
    ids = (body_bytes - 120) // 5  # four digits and a comma each
    shared = [chance.randrange(1000, 9999) for _ in range(ids // 2)]
    made = []
    for number in range(count):
        own = [chance.randrange(1000, 9999) for _ in range(ids)]
        prompt = shared + own[ids // 2 :] if number % 3 == 0 else own
        worded = " ".join(map(str, prompt)) if text else prompt
        payload = body(prompt=worded, stream=stream, max_tokens=max_tokens)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n"
        )
        made.append(head.encode() + payload)
    return made


async def run(port: int, made: list[bytes], concurrency: int) -> LoadResult:
    """Send all requests, `concurrency` at a time; a connection that breaks is opened again."""
    result = LoadResult()
    waiting = iter(made)

    async def worker() -> None:
        loop = asyncio.get_running_loop()
        connection: _Connection | None = None
        for request in waiting:
            if connection is None:
                _, connection = await loop.create_connection(_Connection, "127.0.0.1", port)
            try:
                status = await connection.exchange(request)
            except ConnectionError:
                result.errors += 1
                connection = None
                continue
            result.answered += status == 200
            result.errors += status != 200
        if connection is not None:
            result.chunks += connection.chunks
            connection.transport.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return result
