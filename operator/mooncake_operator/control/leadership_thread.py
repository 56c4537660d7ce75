"""The Lease is renewed in a thread of its own: how busy the passes are must not decide who leads.

Where a machine is short of CPU, the answer to a renewal that took the API server two milliseconds may wait
for seconds in a crowded event loop, and the Lease is lost for nothing. A thread gets its own turns.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from mooncake_operator.control.leadership import Leadership, LeadershipLostError

Make = Callable[[], AbstractAsyncContextManager[Leadership]]
"""Opens a candidate in the event loop that it is entered in."""


class LeadershipThread:
    """A `Leadership` for callers in another event loop.

    Whoever loses the Lease must not act any more: should the process not have ended by the time at which
    another may act, because its own loop hangs, the thread ends it.
    """

    def __init__(self, make: Make, *, end_within_s: float, end: Callable[[int], None] = os._exit) -> None:
        """Take how to make the candidate.

        Args:
            make: the candidate, with a client of its own.
            end_within_s: from the loss of the Lease to the end of the process, at most.
            end: ends the process.
        """
        self._make = make
        self._end_within_s = end_within_s
        self._end = end
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="leadership", daemon=True)
        self._opened: AbstractAsyncContextManager[Leadership] | None = None
        self._candidate: Leadership | None = None
        self._doom: asyncio.TimerHandle | None = None

    async def acquire(self) -> None:
        """As `Leadership.acquire`."""
        self._thread.start()
        await self._there(self._acquire())

    async def hold(self) -> None:
        """As `Leadership.hold`.

        Raises:
            LeadershipLostError: as there.
        """
        await self._there(self._hold())

    async def release(self) -> None:
        """As `Leadership.release`; the thread ends."""
        if not self._thread.is_alive():
            self._loop.close()
            return
        await self._there(self._release())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _acquire(self) -> None:
        opened = self._make()
        self._candidate = await opened.__aenter__()
        self._opened = opened
        await self._candidate.acquire()

    async def _hold(self) -> None:
        assert self._candidate is not None
        try:
            await self._candidate.hold()
        except LeadershipLostError:
            self._doom = self._loop.call_later(self._end_within_s, self._end, 1)
            raise

    async def _release(self) -> None:
        if self._candidate is not None:
            await self._candidate.release()
        if self._opened is not None:
            await self._opened.__aexit__(None, None, None)
        if self._doom is not None:
            self._doom.cancel()
