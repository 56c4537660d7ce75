"""One address for servers that follow each other, as a Kubernetes Service or a name is one."""

from __future__ import annotations

import asyncio
from typing import Self


class Service:
    """Leads each new connection to the port that it has now; those that are there stay where they are.

    Args:
        leads_to: port on this machine; may be changed at any time.
    """

    def __init__(self, leads_to: int) -> None:
        self.leads_to = leads_to
        self._leading: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._leading:
            task.cancel()
        await asyncio.gather(*self._leading, return_exceptions=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._lead(reader, writer))
        self._leading.add(task)
        await asyncio.wait([task])

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection("127.0.0.1", self.leads_to)
        try:
            await asyncio.gather(_pump(reader, on), _pump(there, writer))
        finally:
            for one in (writer, on):
                one.close()
            await asyncio.gather(writer.wait_closed(), on.wait_closed(), return_exceptions=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()
    sink.close()
