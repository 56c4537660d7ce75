"""vLLM's block hashes, so that store keys and events equal those of a real engine.

Rule (vLLM 0.32, `v1/core/kv_cache_utils.py` and `utils/hashing.py`, algorithm `sha256`): a block's hash is
the sha256 of the pickle (protocol 5) of `(parent hash, token ids, extra keys or None)`; the parent of the
first block is the hash of PYTHONHASHSEED, or of a fixed word when that is unset.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_core.blocks import domain_seed, extend_keys

ExtraKeys = tuple[tuple[str, str], ...] | None
"""What distinguishes a block beside its tokens, each value tagged with where it comes from."""

_LOW_64_BITS = (1 << 64) - 1


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


@dataclass(slots=True)
class BlockNames:
    """What a sequence's full blocks are called."""

    hashes: list[bytes] = field(default_factory=list)
    """By the engine."""
    keys: list[int] = field(default_factory=list)
    """By the index (`mooncake_core.blocks`); tests compare the two views."""


class BlockHasher:
    """Hashes full blocks of one engine."""

    def __init__(self, block_size_tokens: int, hash_seed: str | None) -> None:
        self.block_size_tokens = block_size_tokens
        self._root = _digest("vllm-none-hash" if hash_seed is None else hash_seed)

    def extend(self, names: BlockNames, tokens: Sequence[int], salt: str | None, tokens_end: int) -> None:
        """Append the names of the blocks that are full within `tokens[:tokens_end]` and have none yet."""
        size = self.block_size_tokens
        first, end = len(names.hashes), tokens_end // size
        if first >= end:
            return
        parent = names.hashes[-1] if names.hashes else self._root
        for index in range(first, end):
            block = tuple(tokens[index * size : (index + 1) * size])
            parent = _digest((parent, block, extra_keys(index, salt)))
            names.hashes.append(parent)
        parent_key = names.keys[-1] if names.keys else None
        names.keys += extend_keys(
            parent_key, tokens[first * size : end * size], size, domain_seed(cache_salt=salt)
        )


def extra_keys(block_index: int, salt: str | None) -> ExtraKeys:
    """The tagged extra keys of a block: vLLM salts the first block only, the chain carries it on."""
    return (("cache_salt", salt),) if salt and block_index == 0 else None


def external_hash(block_hash: bytes, *, as_int: bool) -> int | bytes:
    """The form in which a hash goes out in events: the low 64 bits, or all of its bytes."""
    return int.from_bytes(block_hash, "big") & _LOW_64_BITS if as_int else block_hash
