"""Writes what the engine holds into the prefix index, whatever happens to Redis meanwhile."""

from __future__ import annotations

import structlog

from mooncake_core.index import PrefixIndex, Source
from mooncake_core.registry import StaleEpochError
from mooncake_sidecar.engine.residency import Residency

_log = structlog.get_logger(__name__)


class IndexWriter:
    """The hand of one residency on the index. The residency is the truth; the index is made to agree.

    Args:
        index: where it is written.
        instance: whose source it is.
        residency: what is written.
    """

    def __init__(self, index: PrefixIndex, instance: str, residency: Residency) -> None:
        self.batches = 0
        """Written so far."""
        self.refills = 0
        """How often everything was written anew."""
        self._index = index
        self._instance = instance
        self._residency = residency
        self._source: Source | None = None
        self._attached = False
        self._spoiled = False
        """Only a part may have been written into this epoch, which could be outdated by now."""

    @property
    def attached(self) -> bool:
        """Whether the index is known to agree, but for what waits."""
        return self._attached

    @property
    def is_open(self) -> bool:
        """Whether there is an epoch to write under."""
        return self._source is not None

    def open(self, epoch: int) -> None:
        """The registry gave an epoch: write under it from now on."""
        self._residency.begin_epoch(epoch)
        self._source = Source(self._instance, epoch)
        self._attached = self._spoiled = False

    def shut(self) -> None:
        """The registration was lost: write no more before the next `open`."""
        self._source = None
        self._attached = False

    def doubt(self) -> None:
        """The connection broke, or Redis is another one: look what the index has before going on."""
        self._attached = False

    async def flush(self) -> None:
        """Write what waits; nothing before `open`.

        Raises:
            ConnectionError: the index cannot be reached; what waits is kept.
            StaleEpochError: the instance must be registered anew, for a new epoch if the residency does not
                continue.
        """
        source = self._source
        if source is None:
            return
        if not self._residency.continues and self._attached:
            # It was attached, then the engine started over: this epoch shows a cache that is no more.
            raise self._stale("the engine started over")
        if not self._attached:
            await self._attach(source)
        while (waiting := self._residency.waiting()) is not None:
            changes, version = waiting
            self._acknowledge(await self._index.apply(source, changes, version), version)
            self.batches += 1

    async def close(self, *, forget: bool) -> None:
        """Write no more; with `forget`, the engine's cache is gone and the index is told so."""
        source, self._source = self._source, None
        self._attached = False
        if forget and source is not None:
            await self._index.detach(source)

    async def _attach(self, source: Source) -> None:
        await self._index.attach(source)
        applied = await self._index.apply(source, [], -1)
        if self._residency.continues:
            if not self._residency.carries_on_from(applied):
                raise self._stale(f"the index is at {applied}, which cannot be carried on")
            self._residency.acknowledge(applied)
        elif applied >= 0 or self._spoiled:
            raise self._stale("the epoch has been written to already")
        else:
            changes, version = self._residency.everything()
            try:
                self._acknowledge(await self._index.apply(source, changes, version), version)
            except ConnectionError:
                self._spoiled = True
                raise
            self.refills += 1
            _log.info("index filled", epoch=source.epoch, blocks=sum(len(change.keys) for change in changes))
        self._attached = True

    def _acknowledge(self, applied: int, version: int) -> None:
        if applied > version:
            raise self._stale(f"someone else has written up to {applied}")
        self._residency.acknowledge(applied)

    def _stale(self, why: str) -> StaleEpochError:
        self._attached = False
        self._source = None
        if self._residency.continues:
            self._residency.lose_index()
        return StaleEpochError(f"{self._instance}: a new epoch is needed: {why}")
