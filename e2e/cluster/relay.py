"""Reaches into a cluster's network from the host's loopback.

``python -m e2e.cluster.relay CLUSTER DESCRIPTOR:ADDRESS:PORT…`` serves listening sockets that it inherits and
connects inside. So kubectl, the tests and an operator started by hand need not enter the network namespace,
and no device of the host leads there.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import uvloop

from e2e.cluster import network
from e2e.cluster.accepting import accepting
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_CHUNK_BYTES = 256 * 1024


@asynccontextmanager
async def relayed(layout: Layout, listener: socket.socket, address: str, port: int) -> AsyncIterator[None]:
    """Forward what comes in on a listening socket to an address inside, until the caller is done."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await _connect(layout, address, port)
        except (OSError, ClusterError):
            writer.transport.abort()
            return
        ends = writer, inner_writer
        is_whole = False
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, inner_writer))
                both.create_task(_copy(inner_reader, writer))
            is_whole = True
        except* OSError:
            pass
        finally:
            for end in ends:
                if is_whole:
                    end.close()
                else:  # a connection that is broken, or broken off, is so on both sides
                    end.transport.abort()
        for end in ends:
            with suppress(OSError):
                # While something is left to be sent it is under way, and whoever is done sees to it.
                await end.wait_closed()

    async with accepting(listener, forward, _CHUNK_BYTES):
        yield


async def _connect(
    layout: Layout, address: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    inner = network.socket_inside(layout)
    try:
        inner.setblocking(False)
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(inner, (address, port))
        return await asyncio.open_connection(sock=inner, limit=_CHUNK_BYTES)
    except BaseException:
        inner.close()
        raise


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side ends; a half-closed connection stays open the other way."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _main(cluster: str, routes: list[str]) -> None:
    layout = Layout(cluster)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with AsyncExitStack() as serving:
        for route in routes:
            descriptor, address, port = route.rsplit(":", 2)
            listener = socket.socket(fileno=int(descriptor))
            await serving.enter_async_context(relayed(layout, listener, address, int(port)))
        await ended.wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2:]))
