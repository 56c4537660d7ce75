"""One operator process from start to end: what runs beside what, and what stops when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import structlog

from mooncake_operator.control.contract import Key
from mooncake_operator.control.leadership import Leadership
from mooncake_operator.control.leadership_thread import LeadershipThread
from mooncake_operator.control.resync import Resync
from mooncake_operator.control.workers import Workers
from mooncake_operator.control.workqueue import WorkQueue

_log = structlog.get_logger()

_QUICK_END_S = 60.0
_MOST_QUICK_ENDS = 8
_LONGEST_PAUSE_S = 30.0
_OLDEST_KEY_S = 300.0
_MOST_FAILED_LISTS = 3

Watch = Callable[[asyncio.Event], Awaitable[None]]
"""Watches until the event, or a signal; may fail, and is then called again."""


class WatchingFailedError(Exception):
    """Watching ended again and again: a new process may fare better."""


class Lifecycle:
    """The tasks of one operator.

    Watching begins at once, also in an operator that waits for the Lease, which thus takes over warm. Workers
    and resync wait for the Lease.
    """

    def __init__(
        self,
        *,
        queue: WorkQueue[Key],
        workers: Workers,
        resync: Resync,
        watch: Watch,
        leadership: Leadership | LeadershipThread | None = None,
        stop_s: float = 20.0,
        on_watch_failed: Callable[[], None] = lambda: None,
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the parts.

        Args:
            queue: what workers take from.
            workers: they act.
            resync: fills the queue.
            watch: fills the queue too.
            leadership: None = act without a Lease.
            stop_s: how long passes may go on once the process is asked to stop.
            on_watch_failed: told when watching has to begin anew.
            observe: called every second.
        """
        self._queue = queue
        self._workers = workers
        self._resync = resync
        self._watch = watch
        self._leadership = leadership
        self._stop_s = stop_s
        self._on_watch_failed = on_watch_failed
        self._observe = observe
        self._stop = asyncio.Event()
        self._leading = asyncio.Event()
        self._stop_watching = asyncio.Event()

    @property
    def leading(self) -> bool:
        """Whether this operator acts."""
        return self._leading.is_set()

    def stop(self) -> None:
        """Ask for an orderly end."""
        self._stop.set()

    def unhealthy(self) -> str | None:
        """What is wrong, if a new process might mend it."""
        if not self.leading:
            return None
        age_s = self._queue.oldest_age_s()
        if age_s > _OLDEST_KEY_S:
            return f"a key has waited for {age_s:.0f} s"
        if self._resync.failures >= _MOST_FAILED_LISTS:
            return f"{self._resync.failures} resyncs in a row failed"
        return None

    async def run(self) -> None:
        """Run until `stop` is called.

        Raises:
            LeadershipLostError: another operator may act now, so that this one must not.
            WatchingFailedError: watching does not stay up.
        """
        # All before the first watch: kopf, when it ends, cancels what was born in the loop after its start.
        lead = asyncio.create_task(self._lead(), name="leadership")
        work = asyncio.create_task(self._workers.run(self._leading), name="workers")
        resync = asyncio.create_task(self._resync_when_leading(), name="resync")
        observe = asyncio.create_task(self._observe_each_second(), name="observe")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.sleep(0)
        watch = asyncio.create_task(self._keep_watching(), name="watch")
        tasks: set[asyncio.Task[Any]] = {lead, work, resync, observe, stopped, watch}
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if lead not in ended:
                # The Lease is still held, so that what was begun may be finished.
                await self._finish(work, lead)
            for task in ended:
                task.result()
        finally:
            self._stop_watching.set()
            await self._end(tasks - {watch})
            await asyncio.wait({watch}, timeout=self._stop_s)
            await self._end({watch})
            if self._leadership is not None:
                await self._leadership.release()

    async def _finish(self, work: asyncio.Task[None], lead: asyncio.Task[None]) -> None:
        if not self.leading:
            return
        self._queue.close()
        await asyncio.wait({work, lead}, timeout=self._stop_s, return_when=asyncio.FIRST_COMPLETED)

    @staticmethod
    async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self) -> None:
        if self._leadership is not None:
            await self._leadership.acquire()
        self._leading.set()
        if self._leadership is None:
            await asyncio.Event().wait()
        else:
            await self._leadership.hold()

    async def _resync_when_leading(self) -> None:
        await self._leading.wait()
        await self._resync.run()

    async def _observe_each_second(self) -> None:
        while True:
            self._observe()
            await asyncio.sleep(1)

    async def _keep_watching(self) -> None:
        clock = asyncio.get_running_loop().time
        quick_ends = 0
        while True:
            began_s = clock()
            try:
                await self._watch(self._stop_watching)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            else:
                # Unasked: then a signal came that it took for itself.
                self._stop.set()
                return
            if self._stop_watching.is_set():
                return
            quick_ends = quick_ends + 1 if clock() - began_s < _QUICK_END_S else 1
            if quick_ends > _MOST_QUICK_ENDS:
                raise WatchingFailedError(f"watching does not stay up: {why}")
            pause_s = min(_LONGEST_PAUSE_S, 0.5 * 2.0**quick_ends)
            _log.warning("watching begins anew", why=why, in_s=pause_s)
            self._on_watch_failed()
            # What was missed meanwhile, deletions above all, only a fresh list shows.
            self._resync.request()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop_watching.wait()
                return
