"""The work queue: a `Backlog` on the event loop's clock, with waiting workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from mooncake_operator.control.backlog import Backlog

Key = TypeVar("Key", bound=Hashable)


class QueueClosedError(Exception):
    """The queue hands out nothing any more: the worker ends."""


class WorkQueue(Generic[Key]):
    """Keys for workers; see `Backlog` for the contract. All calls come from one event loop."""

    def __init__(
        self,
        *,
        rest_s: float = 0.0,
        on_added: Callable[[], None] = lambda: None,
        on_taken: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Begin empty and open.

        Args:
            rest_s: how long a key rests between two passes.
            on_added: told of each wish for a key.
            on_taken: told how long a key was due before it was handed out.
        """
        self._backlog: Backlog[Key] = Backlog(rest_s=rest_s)
        self._on_added = on_added
        self._on_taken = on_taken
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, key: Key) -> None:
        """Let a key be worked on as soon as it may."""
        self._on_added()
        self._backlog.add(key, self._now_s())
        self._wake()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Let a key be worked on after a while; of several wishes the earliest counts."""
        self._on_added()
        now_s = self._now_s()
        self._backlog.add_at(key, now_s + delay_s, now_s)
        self._wake()

    async def take(self) -> Key:
        """Wait for a key; the caller gives it back with `done`.

        Raises:
            QueueClosedError: no more work is handed out.
        """
        while not self._closed:
            now_s = self._now_s()
            if taken := self._backlog.take(now_s):
                key, since_s = taken
                self._on_taken(now_s - since_s)
                return key
            await self._change()
        raise QueueClosedError

    def done(self, key: Key) -> None:
        """Give a key back."""
        self._backlog.done(key, self._now_s())
        self._wake()

    def close(self) -> None:
        """Hand out nothing more; keys that are out are given back as ever."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        while self._waiters:
            self._release(self._waiters.popleft())

    @property
    def depth(self) -> int:
        """Keys that are due and not being worked on."""
        return self._backlog.depth

    @property
    def active(self) -> int:
        """Keys that are being worked on."""
        return self._backlog.active

    def oldest_age_s(self) -> float:
        """For how long the key that waits longest has been due."""
        since_s = self._backlog.oldest_s()
        return 0.0 if since_s is None else max(0.0, self._now_s() - since_s)

    async def _change(self) -> None:
        self._set_alarm()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # The wake-up was meant for whoever waits, not for this worker alone.
            if waiter.done() and not waiter.cancelled():
                self._wake()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        if self._closed:
            return
        self._set_alarm()
        if self._backlog.depth:
            while self._waiters:
                if self._release(self._waiters.popleft()):
                    return

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due_s = self._backlog.next_due_s()
        if due_s is not None:
            self._alarm = asyncio.get_running_loop().call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        while self._waiters:
            if self._release(self._waiters.popleft()):
                break

    @staticmethod
    def _release(waiter: asyncio.Future[None]) -> bool:
        if waiter.done():
            return False
        waiter.set_result(None)
        return True

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
