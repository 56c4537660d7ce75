"""The admin port: uvicorn in the scheduler's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: they are the scheduler's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Serves an application on a port.

    Args:
        api: the application.
    """

    def __init__(self, api: FastAPI) -> None:
        self._server = _Server(
            uvicorn.Config(
                api, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except BaseException:
            listener.close()
            raise
        bound: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="admin")
        while not (self._server.started or self._task.done()):  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0.005)
        return bound

    async def stop(self) -> None:
        """Stop."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
