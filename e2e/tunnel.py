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

from e2e.cluster.accepting import accepting
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
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _forward(kube, namespace, choose, reader, writer)

    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    async with accepting(listener, forward, _CHUNK_BYTES):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


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
