"""A small HTTP/1.1 client with kept connections, for calls between simulated processes."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import msgspec

_Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CallError(Exception):
    """The other side answered with an error status, or with something that is not an answer."""


class HttpClient:
    """Calls to one base URL (`http://host:port`). Connections are kept and used by one call at a time."""

    def __init__(self, base_url: str, *, timeout_s: float = 10.0) -> None:
        parts = urlsplit(base_url)
        if not parts.hostname or not parts.port:
            raise ValueError(f"{base_url}: write http://host:port")
        self._host = parts.hostname
        self._port = parts.port
        self._timeout_s = timeout_s
        self._idle: list[_Pair] = []

    async def get_json(self, path: str) -> object:
        """GET a JSON document.

        Raises:
            CallError: the status was not 200, or the body no JSON.
            OSError, TimeoutError: nobody answered.
        """
        body = await self._call("GET", path, b"")
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise CallError(f"GET {path}: {error}") from error

    async def call(self, path: str, value: object, *, timeout_s: float | None = None) -> object:
        """POST a msgpack document and read one.

        Raises:
            CallError: the status was not 200, or the body no msgpack.
            OSError, TimeoutError: nobody answered.
        """
        body = await self._call("POST", path, msgspec.msgpack.encode(value), timeout_s)
        try:
            return msgspec.msgpack.decode(body)
        except msgspec.DecodeError as error:
            raise CallError(f"POST {path}: {error}") from error

    def close(self) -> None:
        """Close the kept connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float | None = None) -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        async with asyncio.timeout(timeout_s or self._timeout_s):
            while True:
                kept = bool(self._idle)
                pair = self._idle.pop() if kept else await asyncio.open_connection(self._host, self._port)
                try:
                    status, answer, keep = await _exchange(pair, head + body)
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    pair[1].close()
                    if kept:
                        continue  # It was closed while it lay idle: that is no answer yet.
                    raise ConnectionError(f"{self._host}:{self._port} closed the connection") from error
                except BaseException:
                    pair[1].close()
                    raise
                break
        if keep:
            self._idle.append(pair)
        else:
            pair[1].close()
        if status != 200:
            raise CallError(f"{method} {path}: {status} {answer[:200].decode(errors='replace')}")
        return answer


async def _exchange(pair: _Pair, data: bytes) -> tuple[int, bytes, bool]:
    reader, writer = pair
    writer.write(data)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lines = head.split("\r\n")
    status = int(lines[0].split(" ", 2)[1])
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return status, body, headers.get("connection", "").lower() != "close"


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)
