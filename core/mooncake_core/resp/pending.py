"""A reply on its way, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any

Told = Callable[["Pending"], object]


class Pending:
    """Awaitable for one reply, or for the list of the next `many`.

    A task may wait for it as for a future. Whoever registers a callback without a context is called at once,
    in the turn of the loop in which the reply came: a future would take another turn, which costs a request
    that asks Redis twice more than all the rest of asking.

    Args:
        loop: whose tasks may wait.
        deadline_s: of the loop's clock; who owns the connection looks at it.
        many: replies that belong together; 0 = one, not in a list.
        posted: nobody waits.
    """

    __slots__ = (
        "_asyncio_future_blocking", "_context", "_error", "_loop", "_reply", "_told", "deadline_s",
        "is_done", "many", "posted", "replies",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deadline_s: float, many: int = 0, posted: bool = False
    ) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._told: Told | None = None
        self._context: Context | None = None
        self._reply: Any = None
        self._error: BaseException | None = None
        self.deadline_s = deadline_s
        self.is_done = False
        self.many = many
        self.posted = posted
        self.replies: list[Any] | None = [] if many else None

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def fulfil(self, reply: Any, error: BaseException | None = None) -> None:
        """The reply is there, or what came instead. Nothing happens when the wait is over already."""
        if self.is_done:
            return
        self.is_done = True
        self._reply = reply
        self._error = error
        told, self._told = self._told, None
        if told is None:
            return
        if self._context is None:
            told(self)
        else:
            self._loop.call_soon(told, self, context=self._context)

    # -- what tasks and flows ask of a future

    def result(self) -> Any:
        """The reply.

        Raises:
            BaseException: what came instead.
        """
        if self._error is not None:
            raise self._error
        return self._reply

    def done(self) -> bool:
        """Whether waiting is over."""
        return self.is_done

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Whose tasks may wait."""
        return self._loop

    def add_done_callback(self, told: Told, *, context: Context | None = None) -> None:
        """Call when waiting is over: at once, or with a context in the next turn of the loop. One waits."""
        assert self._told is None, "only one may wait for a reply"
        self._told = told
        self._context = context

    def remove_done_callback(self, told: Told) -> int:
        """Nobody waits any more."""
        had, self._told = self._told, None
        return 0 if had is None else 1

    def cancel(self, msg: object = None) -> bool:
        """Wait no more; the reply is dropped when it comes."""
        if self.is_done:
            return False
        self.fulfil(None, asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True
