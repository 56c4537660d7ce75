"""Tells every waiter that something changed."""

from __future__ import annotations

import asyncio


class Changes:
    """A broadcast without a value: whoever waits looks again."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake everyone who waits now."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next `notify`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
