"""Requests side by side: what does not depend on each other need not wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Answer = TypeVar("Answer")

AT_ONCE = 16
"""Requests of one pass at a time: enough to hide the way there and back, few enough for others."""


async def together(jobs: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all of them; answers in their order.

    Raises:
        BaseException: of the first that failed, once all have ended: nobody goes on behind the pass's back.
    """
    results = await asyncio.gather(*jobs, return_exceptions=True)
    answers = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        answers.append(result)
    return answers
