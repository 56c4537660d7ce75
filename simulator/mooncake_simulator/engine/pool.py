"""The engine's HBM in blocks: reference counts, prefix cache, LRU eviction, and the events that mirror it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that became part of the prefix cache, in chain order."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str | None = None
    """Cache salt, where the first of these blocks is the first of its chain."""
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class Removed:
    """A block that was evicted."""

    hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was dropped."""


CacheEvent = Stored | Removed | Cleared


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; the caller checks `free_blocks` first."""


class BlockPool:
    """A fixed number of blocks, as vLLM's `BlockPool`: block 0 is a placeholder that nobody gets.

    A freed block keeps its content until it is handed out again, so it can be hit until then. Freed blocks
    with content queue up at the back (least recently used first out), freed blocks without content go to
    the front. Other than vLLM, a second copy of a cached block is not entered into the cache: the events
    then mirror the cache exactly (ADR 0014).
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, one of them the placeholder; got {blocks}")
        self.total_blocks = blocks
        self.events: list[CacheEvent] = []
        self._references = [0] * blocks
        self._hash_of: list[bytes | None] = [None] * blocks
        self._block_of: dict[bytes, int] = {}
        self._keys: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones among them."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0..1."""
        return 1.0 - len(self._free) / (self.total_blocks - 1)

    def cached_hashes(self) -> list[bytes]:
        """The hashes of all blocks in the prefix cache, in no particular order."""
        return list(self._block_of)

    def cached_keys(self) -> list[int]:
        """What the index calls those blocks."""
        return list(self._keys.values())

    def references(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._references[block]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a hash chain."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks nobody holds: taking them lowers `free_blocks` by as many."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def take(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks, which thereby cannot be evicted."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks, evicting the least recently used content.

        Raises:
            OutOfBlocksError: fewer than `count` blocks are free.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def store(self, block: int, block_hash: bytes, key: int) -> bool:
        """Enter a held, computed block into the prefix cache; False when its content is there already.

        `key` is what the index calls the block.
        """
        if block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._keys[block_hash] = key
        self._hash_of[block] = block_hash
        return True

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks; the first ones are evicted first, so chains are released tail first."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Drop the prefix cache; refused (False) while any block is held, as vLLM does."""
        if len(self._free) != self.total_blocks - 1:
            return False
        self._block_of.clear()
        self._keys.clear()
        self._hash_of = [None] * self.total_blocks
        self.events.append(Cleared())
        return True

    def take_events(self) -> list[CacheEvent]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash], self._keys[block_hash]
            self._hash_of[block] = None
            self.events.append(Removed(block_hash))
