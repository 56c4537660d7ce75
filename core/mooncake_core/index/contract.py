"""The prefix-index contract, kept by two implementations that pass the same tests (memory and Redis)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntFlag
from typing import NamedTuple, Protocol, TypeAlias


class Tier(IntFlag):
    """Where a block lies. A holder may have one block in several tiers at once."""

    HBM = 1
    DRAM = 2
    SSD = 4


class Source(NamedTuple):
    """One life of one holder: an engine instance or a KV cache pool, with the epoch the registry gave it."""

    instance: str
    epoch: int


class Stored(NamedTuple):
    """Blocks that a source now holds in a tier."""

    keys: Sequence[int]
    tier: Tier


class Removed(NamedTuple):
    """Blocks that a source no longer holds in a tier."""

    keys: Sequence[int]
    tier: Tier


Change: TypeAlias = Stored | Removed


class Depth(NamedTuple):
    """How many blocks from the start of a prompt a holder has without a hole.

    Cumulative, as Mooncake's indexer counts: `hbm` by HBM alone, `dram` by HBM or DRAM, `ssd` by any tier;
    so hbm <= dram <= ssd.
    """

    hbm: int
    dram: int
    ssd: int


class PrefixIndex(Protocol):
    """Which source holds which blocks. Keys are those of `core.blocks` (u64, prefix-chained).

    Every method may raise ConnectionError when the shared state is away or slower than its budget.
    """

    async def attach(self, source: Source) -> None:
        """Begin a life: blocks of every other epoch of this instance are forgotten at once (O(1)).

        Attaching the current epoch again changes nothing. An older epoch than the current one raises
        StaleEpochError (from `core.registry`).
        """

    async def detach(self, source: Source) -> None:
        """End a life; its blocks are forgotten. A stale epoch is ignored."""

    async def apply(self, source: Source, changes: Sequence[Change], sequence: int) -> int:
        """Carry out the changes in order, once: a `sequence` not above the last one applied does nothing.

        Returns the last sequence applied for this source (so the writer knows where to go on).

        Raises:
            StaleEpochError: the source is not the attached life of its instance.
        """

    async def match(self, keys: Sequence[int]) -> Mapping[str, Depth]:
        """How deep each holder knows this prefix, by instance id; holders with nothing are left out."""

    async def match_many(self, requests: Sequence[Sequence[int]]) -> Sequence[Mapping[str, Depth]]:
        """`match` for several prefixes in one round trip."""
