"""A request's coroutine, driven by hand instead of by a task.

A request is written as one coroutine from top to bottom. What wakes it are the protocols' callbacks, in the
same turn of the loop; what stops it is an exception thrown into it where it waits: `ClientLeftError`, or
`DeadlineError` when the deadline of its present phase has passed. A task would give neither (its only
interruption is CancelledError) and costs several turns of the loop for each request (ADR 0013).

Waiting comes in two forms: `await park()` until the next `wake()`, always in a loop around the condition
waited for; and `await future`. Libraries that ask for the current task (`asyncio.timeout`) must be wrapped:
`await asyncio.ensure_future(coroutine)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from math import inf
from typing import Any, Final


class Interruption(Exception):
    """Thrown into a flow from outside."""


class ClientLeftError(Interruption):
    """The client closed its connection."""


class DeadlineError(Interruption):
    """The present phase took too long."""


class StagedLostError(Interruption):
    """The instance ended at which KV is staged that decode has not taken."""


class _Park:
    def __await__(self) -> Generator[None, None, None]:
        yield None


_PARK: Final = _Park()


def park() -> Awaitable[None]:
    """Wait for the next `Flow.wake`; the caller checks its condition before and after."""
    return _PARK


class Flow:
    """Drives one coroutine.

    Args:
        coroutine: what to run. It must catch its own errors: one that escapes goes to `on_error`.
        on_done: called once when it has ended.
        on_error: called with an exception that escaped, before `on_done`.
    """

    __slots__ = (
        "_coroutine", "_future", "_on_done", "_on_error", "_parked", "_pending", "_running", "deadline_s",
        "shielded",
    )  # fmt: skip

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        on_done: Callable[[Flow], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._coroutine = coroutine
        self._on_done = on_done
        self._on_error = on_error
        self._parked = False
        self._running = False
        self._future: asyncio.Future[Any] | None = None
        self._pending: Interruption | None = None
        self.shielded = False
        """Interruptions wait: what is going on could not be undone if its end were not seen."""
        self.deadline_s = inf
        """Monotonic seconds after which `expire` interrupts the flow; set anew by each phase."""

    def start(self) -> None:
        """Run until the first wait."""
        self._step(None)

    def wake(self) -> None:
        """Something that the flow may be waiting for has happened."""
        if self._parked:
            self._parked = False
            self._step(None)

    def interrupt(self, reason: Interruption) -> None:
        """Throw into the flow where it waits; at its next wait when it runs just now or is shielded."""
        if self._running or self.shielded:
            # Whatever else comes while it cannot be told: nobody is there any more to do the rest for.
            if not isinstance(self._pending, ClientLeftError):
                self._pending = reason
        elif self._parked:
            self._parked = False
            self._step(reason)
        elif self._future is not None:
            future, self._future = self._future, None
            future.remove_done_callback(self._future_done)
            future.cancel()
            self._step(reason)

    def check(self) -> None:
        """Let an interruption that waited for the end of a shield happen here, from within the flow.

        Raises:
            Interruption: what came meanwhile.
        """
        if self._pending is not None and not self.shielded:
            pending, self._pending = self._pending, None
            raise pending

    def expire(self, now_s: float) -> None:
        """Interrupt the flow when its deadline has passed."""
        if now_s > self.deadline_s:
            self.deadline_s = inf
            self.interrupt(DeadlineError())

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        if future is not self._future:
            # Interrupted after it was done and before this call: the loop had it in its list already.
            return
        self._future = None
        self._step(None)

    def _step(self, thrown: Interruption | None) -> None:
        self._running = True
        try:
            awaited = self._coroutine.send(None) if thrown is None else self._coroutine.throw(thrown)
            while self._pending is not None and not self.shielded:
                pending, self._pending = self._pending, None
                if awaited is not None:
                    awaited.cancel()
                awaited = self._coroutine.throw(pending)
        except StopIteration:
            self._on_done(self)
            return
        except BaseException as error:
            self._on_error(error)
            self._on_done(self)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            self._running = False
        if awaited is None:
            self._parked = True
        else:
            awaited._asyncio_future_blocking = False
            self._future = awaited
            awaited.add_done_callback(self._future_done)
