"""Which objects wait to be looked at: pure bookkeeping, for `control.workqueue` to run."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Backlog(Generic[Key]):
    """Keys that are due, keys that are due later, and keys that are being worked on.

    The contract is that of client-go's work queue: a key waits at most once; a key that is being worked on is
    never handed out a second time, but comes again when it was added meanwhile. In addition a key rests
    `rest_s` between two passes, so that a burst of events becomes one pass.

    All times are seconds of one monotonic clock, the caller's.
    """

    def __init__(self, *, rest_s: float = 0.0) -> None:
        """Begin empty."""
        self._rest_s = rest_s
        self._waiting: dict[Key, float] = {}
        """Due keys in the order in which they came, with the time since when each is due."""
        self._later: dict[Key, float] = {}
        self._alarms: list[tuple[float, int, Key]] = []
        self._alarms_set = 0
        self._active: dict[Key, float | None] = {}
        """Keys handed out, with the time since when each is due again."""
        self._rested_at: dict[Key, float] = {}

    def add(self, key: Key, now_s: float) -> None:
        """Let a key be worked on as soon as it may."""
        if key in self._active:
            if self._active[key] is None:
                self._active[key] = now_s
        elif key not in self._waiting:
            rested_at = self._rested_at.get(key, now_s)
            if rested_at > now_s:
                self._set_alarm(key, rested_at)
            else:
                self._become_due(key, now_s)

    def add_at(self, key: Key, due_s: float, now_s: float) -> None:
        """Let a key be worked on at a later time; of several times the earliest counts."""
        if due_s <= now_s:
            self.add(key, now_s)
        elif key not in self._waiting:
            self._set_alarm(key, due_s)

    def take(self, now_s: float) -> tuple[Key, float] | None:
        """Hand out the key that has been due for longest, and since when it was; None if there is none.

        Wishes of this key for later times are dropped: the pass that begins sees the world as it is, and says
        itself when to come back.
        """
        self._ring(now_s)
        if not self._waiting:
            return None
        key = next(iter(self._waiting))
        since_s = self._waiting.pop(key)
        self._later.pop(key, None)
        self._active[key] = None
        return key, since_s

    def done(self, key: Key, now_s: float) -> None:
        """Take a key back after its pass."""
        again_since_s = self._active.pop(key)
        self._rested_at = {k: at for k, at in self._rested_at.items() if at > now_s}
        if self._rest_s > 0:
            self._rested_at[key] = now_s + self._rest_s
        if again_since_s is not None:
            self.add(key, now_s)

    def next_due_s(self) -> float | None:
        """When the next key becomes due that is not due yet."""
        while self._alarms:
            due_s, _, key = self._alarms[0]
            if self._later.get(key) == due_s:
                return due_s
            heapq.heappop(self._alarms)
        return None

    @property
    def depth(self) -> int:
        """Keys that are due and not being worked on."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Keys that are being worked on."""
        return len(self._active)

    def known(self) -> set[Key]:
        """Keys that are due, now or later."""
        return {*self._waiting, *self._later}

    def oldest_s(self) -> float | None:
        """Since when the key that waits longest has been due."""
        return min(self._waiting.values(), default=None)

    def _become_due(self, key: Key, since_s: float) -> None:
        self._later.pop(key, None)
        self._waiting[key] = since_s

    def _set_alarm(self, key: Key, due_s: float) -> None:
        if due_s < self._later.get(key, float("inf")):
            self._later[key] = due_s
            self._alarms_set += 1
            heapq.heappush(self._alarms, (due_s, self._alarms_set, key))

    def _ring(self, now_s: float) -> None:
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            _, _, key = heapq.heappop(self._alarms)
            del self._later[key]
            if key in self._active:
                self._active[key] = self._active[key] or now_s
            elif key not in self._waiting:
                self._waiting[key] = due_s
