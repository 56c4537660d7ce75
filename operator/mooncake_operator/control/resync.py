"""Resync: looks at every object now and then, whatever the watches have told or failed to tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from mooncake_operator.control.backoff import Backoff
from mooncake_operator.control.contract import Key
from mooncake_operator.control.workqueue import WorkQueue
from mooncake_operator.kube.errors import KubeError

_log = structlog.get_logger()


class Resync:
    """Adds all keys of a fresh LIST to the queue, periodically and on request."""

    def __init__(
        self,
        list_keys: Callable[[], Awaitable[Iterable[Key]]],
        queue: WorkQueue[Key],
        backoff: Backoff[Key],
        *,
        period_s: float = 300.0,
        settle_s: float = 1.0,
        chance: Callable[[], float],
    ) -> None:
        """Take what to list and where to put it.

        Args:
            list_keys: reads all keys from the API server.
            queue: gets them.
            backoff: forgets the failures of those that are gone.
            period_s: between two lists, ± 10 %.
            settle_s: how long requests are collected before they lead to one list.
            chance: numbers of [0, 1), which keep several operators from listing in step.
        """
        self._list_keys = list_keys
        self._queue = queue
        self._backoff = backoff
        self._period_s = period_s
        self._settle_s = settle_s
        self._chance = chance
        self._wanted = asyncio.Event()
        self._seen: set[Key] = set()
        self.failures = 0
        """Lists in a row that failed."""

    def request(self) -> None:
        """Ask for a list soon: a watch has a gap."""
        self._wanted.set()

    async def run(self) -> None:
        """List now, and from then on for ever."""
        while True:
            self._wanted.clear()
            await self._once()
            # After a failure the period would be too long, and asking at once too hot.
            period_s = self._period_s if not self.failures else min(self._period_s, 2.0**self.failures)
            try:
                async with asyncio.timeout(period_s * (0.9 + 0.2 * self._chance())):
                    await self._wanted.wait()
                await asyncio.sleep(self._settle_s)
            except TimeoutError:
                pass

    async def _once(self) -> None:
        try:
            present = set(await self._list_keys())
        except KubeError as error:
            self.failures += 1
            _log.warning("resync failed", error=str(error), failures=self.failures)
            return
        self.failures = 0
        for key in present:
            self._queue.add(key)
        for key in self._seen - present:
            # One more pass each, in which the reconciler sees that the object is gone and forgets it.
            self._backoff.forget(key)
            self._queue.add(key)
        self._seen = present
