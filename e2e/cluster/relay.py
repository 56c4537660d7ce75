"""Reaches into a cluster's network from the host's loopback.

``python -m e2e.cluster.relay CLUSTER DESCRIPTOR:ADDRESS:PORT…`` serves listening sockets that it inherits and
connects inside. So kubectl, the tests and an operator started by hand need not enter the network namespace,
and no device of the host leads there.
"""

import asyncio
import signal
import socket
import sys

import uvloop

from e2e.cluster import network
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_CHUNK_BYTES = 256 * 1024

# asyncio's own references to a reader are weak: once the client has closed, nothing else would hold a forward
# that still waits for the other side.
_forwarding: set[asyncio.Task[None]] = set()


async def serve(layout: Layout, listener: socket.socket, address: str, port: int) -> asyncio.Server:
    """Forward what comes in on a listening socket to an address inside."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(forward(reader, writer))
        _forwarding.add(task)
        task.add_done_callback(_forwarding.discard)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await _connect(layout, address, port)
        except (OSError, ClusterError):
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, inner_writer))
                both.create_task(_copy(inner_reader, writer))
        except* OSError:  # a broken connection is broken on both sides
            for end in (writer, inner_writer):
                end.transport.abort()
        finally:
            for end in (writer, inner_writer):
                end.close()

    return await asyncio.start_server(accept, sock=listener, limit=_CHUNK_BYTES)


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
    for route in routes:
        descriptor, address, port = route.rsplit(":", 2)
        await serve(layout, socket.socket(fileno=int(descriptor)), address, int(port))
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2:]))
