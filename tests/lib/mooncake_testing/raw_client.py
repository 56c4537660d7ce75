"""A client on a bare socket, which can leave at any moment and costs next to nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


def request_bytes(fields: Mapping[str, Any], **headers: str) -> bytes:
    """A completion as it goes over the wire, so that a test can write it in one piece."""
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, **fields}).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class RawClient:
    """One connection to a gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        """Open a connection."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @classmethod
    async def ask(cls, port: int, **fields: Any) -> RawClient:
        """Open a connection and send a completion on it."""
        client = await cls.connect(port)
        await client.send(**fields)
        return client

    async def send(self, **fields: Any) -> None:
        """Send a completion."""
        self.writer.write(request_bytes(fields))
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Read one answer that is not streamed: status and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length = next(
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        )
        return int(lines[0].split()[1]), await self.reader.readexactly(length)

    def leave(self) -> None:
        """Break the connection off."""
        self.writer.transport.abort()
