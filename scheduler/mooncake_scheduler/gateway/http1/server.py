"""The listening socket of the serving side, and its connections (`connection`)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from mooncake_scheduler.gateway.http1.connection import Handler, ServerConnection
from mooncake_scheduler.gateway.http1.reading import ServerLimits


class HttpServer:
    """The listening socket and its connections.

    Args:
        handler: who answers.
        limits: bounds of each connection.
        error_body: makes the body of answers that no handler gives (bad HTTP, too large, too slow).
    """

    def __init__(
        self, handler: Handler, limits: ServerLimits, error_body: Callable[[int, str], bytes]
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.error_body = error_body
        self.connections: set[ServerConnection] = set()
        self.closing = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen (SO_REUSEPORT, so that processes can share a port); returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((host, port))
            listener.setblocking(False)
            self._server = await loop.create_server(
                lambda: ServerConnection(self), sock=listener, backlog=2048
            )
        except BaseException:
            listener.close()
            raise
        bound: int = listener.getsockname()[1]
        return bound

    def check_time(self, now_s: float) -> None:
        """Close connections that idle or send too slowly; call every second or so."""
        for connection in list(self.connections):
            connection.check_time(now_s)

    def announce_end(self) -> None:
        """Go on accepting, but let each answer say that it is the last of its connection.

        A kept connection that is closed in idleness may meet its client's next request half way, which is
        then lost; one whose client was told to close it cannot.
        """
        self.closing = True

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, let answers in progress end for at most `grace_s`, then break off the rest."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        deadline_s = time.monotonic() + grace_s
        while self.connections and time.monotonic() < deadline_s:
            now_s = time.monotonic()
            for connection in list(self.connections):
                if connection.idle and connection.spared_until_s < now_s:
                    connection.close()
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.abort()
        # One turn of the loop lets connection_lost run.
        await asyncio.sleep(0)
