"""Workers: take a key, reconcile it, and see that it comes again when it must."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from mooncake_operator.control.backoff import Backoff
from mooncake_operator.control.contract import Key, Reconciler
from mooncake_operator.control.schedulers import SchedulersAwayError
from mooncake_operator.control.workqueue import QueueClosedError, WorkQueue
from mooncake_operator.kube.errors import KubeError

_log = structlog.get_logger()


class PassObserver(Protocol):
    """Told of each pass: how it ended (success, requeue, error) and how long it took."""

    def __call__(self, result: str, seconds: float) -> None: ...


class Workers:
    """A fixed number of tasks on one queue."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconciler: Reconciler,
        backoff: Backoff[Key],
        *,
        count: int = 4,
        pass_timeout_s: float = 120.0,
        observe: PassObserver = lambda result, seconds: None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        """Take what the workers work on; nothing starts yet."""
        self._queue = queue
        self._reconciler = reconciler
        self._backoff = backoff
        self._count = count
        self._pass_timeout_s = pass_timeout_s
        self._observe = observe
        self._on_retry = on_retry

    async def run(self, gate: asyncio.Event | None = None) -> None:
        """Work until the queue is closed and what was begun is finished.

        Args:
            gate: no key is taken before it is set. The tasks exist before: kopf takes for its own, and
                cancels, whatever is born in the loop after its start.
        """
        tasks = [asyncio.create_task(self._work(gate), name=f"worker-{n}") for n in range(self._count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, gate: asyncio.Event | None) -> None:
        if gate is not None:
            await gate.wait()
        while True:
            try:
                key = await self._queue.take()
            except QueueClosedError:
                return
            try:
                # Every line that a pass logs names its cluster.
                with structlog.contextvars.bound_contextvars(cluster=str(key)):
                    await self._pass(key)
            finally:
                self._queue.done(key)

    async def _pass(self, key: Key) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(self._pass_timeout_s):
                result = await self._reconciler.reconcile(key)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # kopf, when it ends, cancels tasks in the loop that it takes for its own: no wish of ours.
            self._failed(key, error, clock() - began_s)
        except Exception as error:
            self._failed(key, error, clock() - began_s)
        else:
            self._backoff.forget(key)
            self._observe("success" if result.requeue_after_s is None else "requeue", clock() - began_s)
            if result.requeue_after_s is not None:
                self._queue.add_after(key, result.requeue_after_s)

    def _failed(self, key: Key, error: BaseException, seconds: float) -> None:
        self._observe("error", seconds)
        self._on_retry()
        delay_s = self._backoff.failed(key)
        if isinstance(error, KubeError) and error.retry_after_s is not None:
            delay_s = max(delay_s, error.retry_after_s)
        self._queue.add_after(key, delay_s)
        log = _log.bind(failures=self._backoff.failures(key), retry_in_s=round(delay_s, 2))
        if isinstance(error, (KubeError, SchedulersAwayError, TimeoutError)):
            # The trouble of others is no fault of this program: no traceback.
            log.warning("pass failed", error=str(error) or type(error).__name__)
        else:
            log.error("pass failed", exc_info=error)
