"""Waiting for what other processes do, of which nobody can tell a test."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_EVERY_S = 0.02


async def until(condition: Callable[[], object | Awaitable[object]], within_s: float = 100.0) -> None:
    """Wait until something holds.

    Args:
        condition: plain or asynchronous; that it cannot be asked (ConnectionError) counts as not yet.
        within_s: wall seconds.

    Raises:
        TimeoutError: it does not hold in time.
    """
    async with asyncio.timeout(within_s):
        while not await _holds(condition):
            await asyncio.sleep(_LOOK_EVERY_S)


async def _holds(condition: Callable[[], object | Awaitable[object]]) -> bool:
    try:
        found = condition()
        return bool(await found if inspect.isawaitable(found) else found)
    except ConnectionError:
        return False


def eventually(
    look: Callable[[], T | None],
    what: str,
    within_s: float = 100.0,
    *,
    told: Callable[[], str] = lambda: "",
) -> T:
    """Look until there is something to see; returns it. For tests without an event loop.

    Args:
        look: returns a false value as long as there is nothing.
        what: is waited for, as a statement.
        within_s: wall seconds.
        told: what to say when the time is over.

    Raises:
        AssertionError: the time is over.
    """
    deadline_s = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}\n{told()}"
        time.sleep(5 * _LOOK_EVERY_S)
    return seen
