"""Reaches Services and Pods by way of the API server, where their network cannot be entered.

What ``kubectl port-forward`` does, with two differences: each connection has a stream of its own, so that one
that breaks takes no other along; and a Service's connections go to whichever of its Pods is ready at that
moment, as kube-proxy leads them, instead of holding on to one Pod.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp

from e2e.kube import Kube, KubeError

_CHUNK_BYTES = 64 * 1024
_DATA, _ERROR = 0, 1
"""Channels of the one port that a stream asks for; each begins with the port's number, of two bytes."""
_PORT_BYTES = 2


class Target(NamedTuple):
    """A port of a Pod."""

    pod: str
    port: int


Choose = Callable[[], Awaitable[Target]]


@asynccontextmanager
async def to_service(kube: Kube, name: str, namespace: str, port: int) -> AsyncIterator[str]:
    """Reach a Service's port.

    Yields:
        A base URL on this machine's loopback.
    """
    service = await kube.get("Service", name, namespace)
    port_name = next(each.get("name") for each in service["spec"]["ports"] if each["port"] == port)

    async def choose() -> Target:
        slices = await kube.list_all("EndpointSlice", namespace, labels=f"kubernetes.io/service-name={name}")
        ready = [
            Target(endpoint["targetRef"]["name"], each["port"])
            for found in slices
            for endpoint in found.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready")
            for each in found.get("ports") or ()
            if (each.get("name") or None) == port_name
        ]
        if not ready:
            raise LookupError(f"Service {name} has no ready Pod")
        return random.choice(ready)

    async with _listening(kube, namespace, choose) as url:
        yield url


@asynccontextmanager
async def to_pod(kube: Kube, name: str, namespace: str, port: int) -> AsyncIterator[str]:
    """Reach a Pod's port; yields a base URL as :func:`to_service` does."""

    async def choose() -> Target:
        return Target(name, port)

    async with _listening(kube, namespace, choose) as url:
        yield url


@asynccontextmanager
async def _listening(kube: Kube, namespace: str, choose: Choose) -> AsyncIterator[str]:
    under_way: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    ended = False

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ended:  # it came while the server was being closed
            writer.transport.abort()
            return
        task = asyncio.create_task(_forward(kube, namespace, choose, reader, writer))
        under_way[task] = writer
        task.add_done_callback(under_way.pop)

    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = await asyncio.start_server(accept, sock=listener, limit=_CHUNK_BYTES)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()
        ended = True
        open_ones = dict(under_way)
        for task, writer in open_ones.items():
            task.cancel()
            # A task that is cancelled before it began closes nothing, and one may wait for a slow reader.
            writer.transport.abort()
        await asyncio.gather(*open_ones, return_exceptions=True)
        # Connections that are being accepted take two turns of the loop to be told of, and transports one to
        # end; none is taken for granted after this.
        for _ in range(4):
            await asyncio.sleep(0)


async def _forward(
    kube: Kube,
    namespace: str,
    choose: Choose,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    try:
        target = await choose()
        async with kube.port_forward(target.pod, namespace, target.port) as stream:
            out = asyncio.create_task(_send(reader, stream))
            try:
                await _receive(stream, writer)
            finally:
                out.cancel()
                await asyncio.gather(out, return_exceptions=True)
    except (aiohttp.ClientError, ConnectionError, KubeError, LookupError):
        writer.transport.abort()
    finally:
        writer.close()
        with suppress(OSError):
            # While something is left to be sent it is under way, and whoever ends the server sees to it.
            await writer.wait_closed()


async def _send(reader: asyncio.StreamReader, stream: aiohttp.ClientWebSocketResponse) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        await stream.send_bytes(bytes([_DATA]) + data)
    await stream.close()


async def _receive(stream: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    begun = set[int]()
    async for message in stream:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel not in begun:
            begun.add(channel)
            data = data[_PORT_BYTES:]
        if data and channel == _ERROR:
            raise ConnectionError(data.decode(errors="replace"))
        if data:
            writer.write(data)
            await writer.drain()
