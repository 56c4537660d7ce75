"""Sleeps of fractions of a millisecond.

Event loops wait in whole milliseconds. An engine that runs ten times faster than life decodes a token every
2.7 ms: rounded sleeps would show as jitter of a third in the times between tokens, which is what the system
measures. A timer descriptor of Linux has no such grain.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


_libc = ctypes.CDLL(None, use_errno=True)


class PreciseTimer:
    """One timer for one waiter at a time."""

    def __init__(self) -> None:
        self._descriptor = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def until(self, moment_s: float) -> None:
        """Return at a moment of `time.monotonic`; a moment that has passed only yields to others."""
        if moment_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._descriptor, self._fired)
        self._waiter = loop.create_future()
        self._set(moment_s)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Give the descriptor back."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _set(self, moment_s: float) -> None:
        seconds = int(moment_s)
        value = _TimeSpec(seconds, int((moment_s - seconds) * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        if _libc.timerfd_settime(self._descriptor, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fired(self) -> None:
        os.read(self._descriptor, 8)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
