"""Tokens to block keys: the names under which every part of the system speaks of KV blocks.

The rule is the one NVIDIA Dynamo publishes, to the bit, so that indexes can be compared:

    seed    = 1337 + xxh3_64(lora_name, seed 0) + xxh3_64(cache_salt, seed 1)        (wrapping at 64 bits)
    local_i = xxh3_64(tokens of block i as little-endian u32, seed)
    key_0   = local_0,   key_i = xxh3_64(key_(i-1) || local_i as little-endian u64, seed 1337)

A key thus stands for its block and all before it; it does not depend on any engine's hash seed. Only full
blocks have keys.

Source: crates dynamo-kv-router (`src/protocols.rs`) and dynamo-kv-hashing (`src/salt.rs`), 1.6.1.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from struct import Struct, iter_unpack
from typing import Final, TypeAlias

from xxhash import xxh3_64_intdigest

CHAIN_SEED: Final = 1337
_MASK_U64: Final = (1 << 64) - 1
_TOKEN_BYTES: Final = 4
_PAIR: Final = Struct("<QQ")
_BIG_ENDIAN: Final = sys.byteorder == "big"

Tokens: TypeAlias = Sequence[int] | bytes | bytearray | memoryview
"""Token ids: any sequence of ints (`array('I')` is the quick one), or their little-endian u32 bytes."""


def domain_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """The seed of a cache domain: requests of different LoRA or salt never share a key.

    An empty string counts as absent.
    """
    seed = CHAIN_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & _MASK_U64


def pack_tokens(tokens: Tokens) -> memoryview:
    """Token ids as little-endian u32 bytes; copies only where the input is not in that form already.

    Raises:
        ValueError: an id does not fit in 32 unsigned bits, or the bytes are no whole number of ids.
        TypeError: an element is not an int.
    """
    if isinstance(tokens, array) and tokens.typecode == "I" and not _BIG_ENDIAN:
        return memoryview(tokens).cast("B")
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        view = memoryview(tokens).cast("B")
        if len(view) % _TOKEN_BYTES:
            raise ValueError(f"{len(view)} bytes of token ids: expected a multiple of {_TOKEN_BYTES}")
        return view
    try:
        ids = array("I", tokens)
    except OverflowError:
        raise ValueError("a token id is negative or above 4294967295: ids are unsigned 32-bit") from None
    if _BIG_ENDIAN:
        ids.byteswap()
    return memoryview(ids).cast("B")


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block keys as little-endian u64."""
    packed = keys if isinstance(keys, array) and keys.typecode == "Q" else array("Q", keys)
    return _little_endian(packed).tobytes()


def unpack_keys(data: bytes) -> array[int]:
    """Block keys from their little-endian u64.

    Raises:
        ValueError: the bytes are no whole number of keys.
    """
    keys = array("Q")
    keys.frombytes(data)
    return _little_endian(keys)


def _little_endian(keys: array[int]) -> array[int]:
    if _BIG_ENDIAN:
        keys = keys[:]
        keys.byteswap()
    return keys


def local_hashes(tokens: Tokens, block_size_tokens: int, seed: int = CHAIN_SEED) -> list[int]:
    """The hash of each full block by itself, in order.

    Args:
        tokens: the token ids.
        block_size_tokens: tokens in a block.
        seed: that of the cache domain (`domain_seed`).

    Raises:
        ValueError: the block size is not positive, or a token id is out of range.
    """
    if block_size_tokens < 1:
        raise ValueError(f"block size {block_size_tokens}: expected at least 1 token")
    packed = pack_tokens(tokens)
    size = block_size_tokens * _TOKEN_BYTES
    whole = packed[: len(packed) - len(packed) % size]
    digest = xxh3_64_intdigest
    return [digest(block, seed) for (block,) in iter_unpack(f"{size}s", whole)]


def chain(parent_key: int | None, locals_: Sequence[int]) -> array[int]:
    """Keys of consecutive blocks from their local hashes.

    Args:
        parent_key: the key of the block before the first one, None at the start of a prompt.
        locals_: local hash of each block.
    """
    if not locals_:
        return array("Q")
    pack, digest = _PAIR.pack, xxh3_64_intdigest
    key, rest = (locals_[0], locals_[1:]) if parent_key is None else (parent_key, locals_)
    keys = [key] if parent_key is None else []
    keys += [key := digest(pack(key, local), CHAIN_SEED) for local in rest]
    return array("Q", keys)


def extend_keys(
    parent_key: int | None, tokens: Tokens, block_size_tokens: int, seed: int = CHAIN_SEED
) -> array[int]:
    """Keys of the full blocks in `tokens`, which follow the block `parent_key` (None: the prompt begins)."""
    return chain(parent_key, local_hashes(tokens, block_size_tokens, seed))


def block_keys(
    tokens: Tokens, block_size_tokens: int, *, lora_name: str | None = None, cache_salt: str | None = None
) -> array[int]:
    """The keys of a prompt's full blocks, from its start (`array('Q')`, one u64 a block).

    Args:
        tokens: the prompt's token ids.
        block_size_tokens: the engine's block size.
        lora_name: the LoRA adapter the request runs with.
        cache_salt: the request's `cache_salt`.

    Raises:
        ValueError: the block size is not positive, or a token id is out of range.
    """
    return extend_keys(None, tokens, block_size_tokens, domain_seed(lora_name, cache_salt))
