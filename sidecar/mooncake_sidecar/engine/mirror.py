"""What an engine holds, by its own names for blocks: the truth from which the prefix index is written.

Pure. An engine names blocks by hashes whose seed and algorithm are its own; everyone else knows them by
their keys (`core.blocks`). The mirror keeps both, and for each block what its children need to be keyed: its
key and the seed of its LoRA and salt, which events tell of a prompt's first block only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from mooncake_core.blocks import domain_seed, extend_keys
from mooncake_core.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from mooncake_core.index import Change, Removed, Stored, Tier

_TIERS = (Tier.HBM, Tier.DRAM, Tier.SSD)


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Consecutive blocks of one prompt are held in a tier."""

    tier: int
    shared: bool
    """They lie in the KV cache pool, not in the engine."""
    seed: int
    depth: int
    """Of the first of them: blocks before it in its prompt."""
    hashes: tuple[BlockHash, ...]
    keys: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Blocks are no longer held in a tier."""

    tier: int
    shared: bool
    hashes: tuple[BlockHash, ...]


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """The engine holds nothing any more; the pool keeps what it has."""


Step: TypeAlias = Put | Drop | Clear
"""What one event means, with keys: what is journalled, so that a restart need not see tokens again."""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """All blocks of a mirror, column by column."""

    hashes: list[BlockHash]
    keys: list[int]
    seeds: list[int]
    depths: list[int]
    copies: list[int]
    tiers: list[int]
    shared: list[int]


class Block:
    """One block by its engine's name."""

    __slots__ = ("copies", "depth", "key", "seed", "shared", "tiers")

    def __init__(
        self, key: int, seed: int, depth: int, copies: int = 0, tiers: int = 0, shared: int = 0
    ) -> None:
        self.key = key
        self.seed = seed
        self.depth = depth
        self.copies = copies
        """Copies in HBM: two requests that compute the same block at once leave two, told and removed one by
        one."""
        self.tiers = tiers
        """The engine's own tiers below HBM."""
        self.shared = shared
        """Tiers of the pool."""


class Shared(NamedTuple):
    """A block that came into the pool."""

    hash: bytes
    key: int
    tier: Tier


class Effect(NamedTuple):
    """What a step changed."""

    own: list[Change]
    """For the engine's source in the index."""
    shared: list[Shared]
    """For the pool's."""


class Mirror:
    """The blocks of one engine, and those that it has put into the pool.

    Args:
        has_pool: blocks below HBM lie in a pool shared by engines; else they are the engine's own.
    """

    def __init__(self, *, has_pool: bool) -> None:
        self._has_pool = has_pool
        self._blocks: dict[BlockHash, Block] = {}
        self.orphans = 0
        """Blocks told of whose parent is unknown: without it they have no key."""
        self.nameless = 0
        """Blocks of the pool told of by a shortened hash: the store knows them by the whole one."""
        self.opaque = 0
        """Blocks told of that tokens do not determine (images, embeddings)."""
        self.computed_again = 0
        """Prompts of which the engine computed the first block although it held that very block."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_hash: BlockHash) -> Block | None:
        """A block by its engine's name."""
        return self._blocks.get(block_hash)

    def read(self, event: Event) -> Step | None:
        """What an event means; None when it changes nothing that can be known by keys."""
        if isinstance(event, AllBlocksCleared):
            return Clear()
        shared = self._has_pool and event.medium is not Tier.HBM
        if isinstance(event, BlockRemoved):
            return Drop(int(event.medium), shared, event.hashes)
        return self._read_stored(event, shared)

    def carry_out(self, step: Step) -> Effect:
        """Change the mirror; returns what changed for others."""
        if isinstance(step, Put):
            return self._put(step)
        if isinstance(step, Drop):
            return self._drop(step)
        self.clear()
        return Effect([], [])

    def clear(self) -> None:
        """The engine lost its cache; what lies in the pool stays known."""
        for block in self._blocks.values():
            block.copies = block.tiers = 0
        self._blocks = {name: block for name, block in self._blocks.items() if block.shared}

    def own(self) -> list[Change]:
        """All that the engine holds."""
        held: dict[Tier, list[int]] = {tier: [] for tier in _TIERS}
        # From the start of prompts: a reader that comes in the middle finds prefixes without holes.
        for block in sorted(self._blocks.values(), key=lambda block: block.depth):
            if block.copies:
                held[Tier.HBM].append(block.key)
            for tier in _tiers_of(block.tiers):
                held[tier].append(block.key)
        return [Stored(keys, tier) for tier, keys in held.items() if keys]

    def shared(self) -> Iterator[Shared]:
        """All that this engine has put into the pool, as far as known."""
        for name, block in self._blocks.items():
            if isinstance(name, bytes):
                for tier in _tiers_of(block.shared):
                    yield Shared(name, block.key, tier)

    def image(self) -> Image:
        """Everything, to be journalled."""
        blocks = self._blocks.values()
        return Image(
            list(self._blocks),
            [block.key for block in blocks],
            [block.seed for block in blocks],
            [block.depth for block in blocks],
            [block.copies for block in blocks],
            [block.tiers for block in blocks],
            [block.shared for block in blocks],
        )

    def restore(self, image: Image) -> None:
        """Become what an image shows."""
        columns = zip(
            image.keys, image.seeds, image.depths, image.copies, image.tiers, image.shared, strict=True
        )
        self._blocks = {name: Block(*fields) for name, fields in zip(image.hashes, columns, strict=True)}

    def _read_stored(self, event: BlockStored, shared: bool) -> Put | None:
        known = len(event.hashes) if event.opaque_from is None else event.opaque_from
        self.opaque += len(event.hashes) - known
        parent = None
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                self.orphans += known
                return None
        if shared and not all(isinstance(name, bytes) for name in event.hashes):
            self.nameless += known
            return None
        if not known:
            return None
        tokens = event.token_ids[: known * event.block_size]
        if parent is None:
            seed, depth, parent_key = domain_seed(event.lora_name, event.cache_salt), 0, None
        else:
            seed, depth, parent_key = parent.seed, parent.depth + 1, parent.key
        keys = extend_keys(parent_key, tokens, event.block_size, seed)
        return Put(int(event.medium), shared, seed, depth, event.hashes[:known], tuple(keys))

    def _put(self, step: Put) -> Effect:
        tier = Tier(step.tier)
        new: list[int] = []
        new_shared: list[Shared] = []
        for place, (name, key) in enumerate(zip(step.hashes, step.keys, strict=True)):
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = Block(key, step.seed, step.depth + place)
            if step.shared:
                block.shared |= tier
                # Told again, it was written again: whoever was told that it had gone must hear of it.
                assert isinstance(name, bytes), "the store knows blocks by their whole hash"
                new_shared.append(Shared(name, key, tier))
            elif tier is Tier.HBM:
                if block.copies and not block.depth:
                    self.computed_again += 1
                block.copies += 1
                if block.copies == 1:
                    new.append(key)
            elif not block.tiers & tier:
                block.tiers |= tier
                new.append(key)
        return Effect([Stored(new, tier)] if new else [], new_shared)

    def _drop(self, step: Drop) -> Effect:
        tier = Tier(step.tier)
        gone: list[int] = []
        for name in step.hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            if step.shared:
                block.shared &= ~tier
            elif tier is Tier.HBM:
                if block.copies == 1:
                    gone.append(block.key)
                block.copies = max(0, block.copies - 1)
            elif block.tiers & tier:
                block.tiers &= ~tier
                gone.append(block.key)
            if not (block.copies or block.tiers or block.shared):
                del self._blocks[name]
        return Effect([Removed(gone, tier)] if gone else [], [])


def _tiers_of(flags: int) -> Iterable[Tier]:
    return [tier for tier in _TIERS if flags & tier]
