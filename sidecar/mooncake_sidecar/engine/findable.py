"""Prompts whose beginning was there to be found when they came: what the alarm `never_hit` stands on.

What an engine computes twice its own events tell. What other engines have put into the pool the index knows,
which is asked about one prompt now and then: before this sidecar writes what the prompt has left behind, so
that it is never taken for its own copy. Whether the engine did find it, its metrics say.
"""

from __future__ import annotations

from mooncake_core.index import PrefixIndex
from mooncake_core.resp import ReplyError
from mooncake_sidecar.engine.residency import Residency

LOOK_EVERY_S = 1.0
_FIRST_BLOCKS = 4
"""So many blocks of a prompt are asked about: whether it is known at all is what counts."""


class Findable:
    """Counts such prompts.

    Args:
        index: is asked about the pool.
        store: id of the pool that the engine can fetch from; empty without one.
        residency: of the engine.
    """

    def __init__(self, index: PrefixIndex, store: str, residency: Residency) -> None:
        self._index = index
        self._store = store
        self._residency = residency
        self._in_pool = 0
        self._next_s = 0.0

    @property
    def seen(self) -> int:
        """So far; of those in the pool a sample."""
        return self._in_pool + self._residency.mirror.computed_again

    async def look(self, now_s: float) -> None:
        """Ask about the last prompt, if it is time; an index that does not answer has nothing to tell.

        Args:
            now_s: a clock that never goes back, wall seconds.
        """
        keys, self._residency.begun = self._residency.begun, ()
        if not keys or not self._store or now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_EVERY_S
        try:
            depth = (await self._index.match(keys[:_FIRST_BLOCKS])).get(self._store)
        except (ConnectionError, ReplyError):
            return
        if depth is not None and max(depth):
            self._in_pool += 1
