"""KV events as values, free of the dialect they were spoken in."""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

import msgspec

from mooncake_core.index.contract import Tier

BlockHash: TypeAlias = int | bytes
"""An engine's own name for a block: an unsigned 64-bit int, or the whole digest where it sends bytes."""

_MASK_U64: Final = (1 << 64) - 1


def low64(block_hash: BlockHash) -> int:
    """The int form of a block hash: the digest's last 8 bytes, big-endian and unsigned, as vLLM sends it."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & _MASK_U64


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one prompt that the engine now holds.

    `parent` names the block before the first one, None when the prompt begins here. The salt travels with a
    prompt's first block only: later blocks have `cache_salt` None and inherit their parent's.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: array[int]
    """All the blocks' tokens, `array('I')` of `len(hashes) * block_size` ids."""
    block_size: int
    medium: Tier = Tier.HBM
    lora_name: str | None = None
    cache_salt: str | None = None
    opaque_from: int | None = None
    """The first of these blocks whose content tokens, LoRA and salt do not determine (images, prompt
    embeddings, a LoRA without a name); it and all after it must not be keyed by tokens. None: there is none.
    """
    remote: bool = False
    """The engine says that the blocks lie elsewhere (`locality` REMOTE), as in a pool shared by engines."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that the engine no longer holds in a tier."""

    hashes: tuple[BlockHash, ...]
    medium: Tier = Tier.HBM
    remote: bool = False


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The engine holds nothing any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one scheduling step changed, in order."""

    ts: float
    """Seconds since the Unix epoch, by the engine's clock."""
    events: tuple[Event, ...]
    dp_rank: int | None = None
    unknown: tuple[str, ...] = ()
    """Types, and media, that were skipped because this version does not know them; for counting."""
    other_groups: int = 0
    """Events skipped because they speak of a cache group other than the full attention (sliding windows,
    Mamba states): such blocks do not make a prefix reusable by themselves."""
