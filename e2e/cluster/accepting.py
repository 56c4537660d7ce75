"""Serves a listening socket until the caller is done, and leaves no connection behind."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def accepting(listener: socket.socket, serve: Serve, limit_bytes: int) -> AsyncIterator[None]:
    """Serve what comes in; at the end what is under way is broken off.

    A connection that outlived its event loop would be found by the garbage collector, in a test that has
    nothing to do with it.

    Args:
        listener: bound and listening; closed at the end.
        serve: one connection, which it closes; also when cancelled.
        limit_bytes: that a reader holds.
    """
    # asyncio's own references to a reader are weak: once the client has closed, nothing else would hold a
    # task that still waits for the other side.
    under_way: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
    ended = False

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ended:  # it came while the server was being closed
            writer.transport.abort()
            return
        task = asyncio.create_task(serve(reader, writer))
        under_way[task] = writer
        task.add_done_callback(under_way.pop)

    server = await asyncio.start_server(accept, sock=listener, limit=limit_bytes)
    try:
        yield
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
