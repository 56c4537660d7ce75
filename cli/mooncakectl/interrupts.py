"""Ctrl-C as people mean it: once to end in order, twice to end now."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, SIGINT, SIGTERM and SIGHUP set `asked`; each further one calls `insist`.

    A SIGHUP that was to be ignored stays so: `nohup` means that a program outlives its terminal.
    """

    def __init__(self, insist: Callable[[], None]) -> None:
        """Take what a second interrupt does."""
        self.asked = asyncio.Event()
        self._insist = insist
        self._heeded = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._heeded:
            loop.add_signal_handler(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._heeded:
            loop.remove_signal_handler(number)

    def _arrived(self) -> None:
        if self.asked.is_set():
            self._insist()
        self.asked.set()
