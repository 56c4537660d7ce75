"""The channel between two simulated engines: length-prefixed msgpack over TCP.

It stands for the transfer engine: no KV exists, so what travels is who asks for which request's blocks and
how many tokens they hold; the time of the bytes is waited for at both ends (`links`).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

_LENGTH = struct.Struct(">I")


class Pull(msgspec.Struct, tag=True):
    """A decode engine asks for the blocks of one request."""

    engine_id: str
    transfer: str
    """Mooncake: transfer_id. NIXL: remote_request_id."""
    tokens: int
    """Tokens that the asker lacks; 0 = none, only let go of the blocks."""


class Touch(msgspec.Struct, tag=True):
    """A decode engine will come for these blocks: keep them (NIXL's heartbeat)."""

    transfer: str


class Granted(msgspec.Struct, tag=True):
    """The blocks are there, their bytes begin to flow."""

    tokens: int


class Done(msgspec.Struct, tag=True):
    """All bytes have been sent."""


class Refused(msgspec.Struct, tag=True):
    """They will not come."""

    reason: str


Message = Pull | Touch | Granted | Done | Refused

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


class Channel:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Channel:
        """Open a connection.

        Raises:
            OSError: nobody listens there.
        """
        return cls(*await asyncio.open_connection(host, port))

    async def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ConnectionError: the other side is gone.
        """
        data = _encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    async def receive(self) -> Message:
        """Receive one message.

        Raises:
            EOFError, ConnectionError: the other side is gone.
        """
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return _decoder.decode(await self._reader.readexactly(length))

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


class ChannelServer:
    """Listens for channels; each is served by one call."""

    def __init__(self, serve: Callable[[Channel], Awaitable[None]]) -> None:
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address is in use.
        """
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening, end all channels."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        channel = Channel(reader, writer)
        try:
            with suppress(EOFError, ConnectionError, asyncio.CancelledError):
                await self._serve(channel)
        finally:
            self._tasks.discard(task)
            channel.close()
