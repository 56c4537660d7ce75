"""What was read a moment ago, and of which no event has told since, need not be read again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class _Read(Generic[Thing]):
    """An answer, when it was asked for, and what was known of changes then."""

    answer: Sequence[Thing]
    at_s: float
    changes: int


class Recent:
    """Answers that hold until something is said to have changed, or for a while at most.

    Whoever is told of changes by a watch says so with `changed`, before a pass that is to see them begins. A
    watch may lose one, so no answer holds for ever; after a gap in a watch, `forget` makes all be asked anew.
    """

    def __init__(self, *, trusted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing; not `trusted` = nobody tells of changes, so everything is asked each time."""
        self._trusted = trusted
        self._clock = clock
        self._reads: dict[Hashable, _Read[Any]] = {}
        self._changes: Counter[Hashable] = Counter()

    async def get(
        self, what: Hashable, read: Callable[[], Awaitable[Sequence[Thing]]], *, for_s: float
    ) -> Sequence[Thing]:
        """The last answer while it holds, else a new one.

        Args:
            what: is asked for.
            read: asks.
            for_s: seconds for which an answer may be used without any word of a change.
        """
        known = self._reads.get(what)
        if (
            self._trusted
            and known is not None
            and known.changes == self._changes[what]
            and self._clock() - known.at_s < for_s
        ):
            return known.answer
        # As of before the question: what changes while it is under way may or may not be in the answer.
        at_s, changes = self._clock(), self._changes[what]
        answer = await read()
        self._reads[what] = _Read(answer, at_s, changes)
        return answer

    def changed(self, what: Hashable) -> None:
        """Let this be asked anew."""
        self._changes[what] += 1

    def forget(self) -> None:
        """Let everything be asked anew."""
        for what in self._reads:
            self._changes[what] += 1
