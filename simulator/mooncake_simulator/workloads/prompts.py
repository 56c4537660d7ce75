"""Token ids for requests that came without text: equal block ids give equal tokens, everywhere and always."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import shake_128
from typing import Final, NamedTuple

import msgspec

from mooncake_simulator.workloads.traces import BLOCK_TOKENS, Request

_BYTES: Final = 4 * BLOCK_TOKENS
_CACHED_BLOCKS: Final = 8192


class Vocabulary(NamedTuple):
    """Which tokens stand for block ids."""

    size: int = 32_000
    """Ids are 0 … size - 1."""
    seed: int = 0
    """Another seed gives every block other tokens: a cache warmed with one knows nothing of the other."""


_DEFAULT: Final = Vocabulary()


def prompt_tokens(request: Request, vocabulary: Vocabulary = _DEFAULT) -> array[int]:
    """The prompt of a request, `array('I')` of `input_length` ids."""
    tokens = array("I")
    for hash_id in request.hash_ids:
        tokens.extend(_block(hash_id, vocabulary))
    del tokens[request.input_length :]
    return tokens


def prompt_json(request: Request, vocabulary: Vocabulary = _DEFAULT) -> bytes:
    """The prompt of a request as a JSON array of ids; several times quicker than encoding `prompt_tokens`."""
    return b"".join(prompt_json_parts(request, vocabulary))


def prompt_json_parts(request: Request, vocabulary: Vocabulary) -> Iterator[bytes]:
    """`prompt_json` block by block, for those who have other things to do between."""
    *full, last = request.hash_ids
    before = b"["
    for hash_id in full:
        yield before + _block_json(hash_id, vocabulary)
        before = b","
    rest = request.input_length - BLOCK_TOKENS * len(full)
    yield before + _joined(_block(last, vocabulary)[:rest]) + b"]"


def _block(hash_id: int, vocabulary: Vocabulary) -> array[int]:
    """The 512 tokens of a block: SHAKE-128 of its id and the seed, as little-endian u32, modulo the size."""
    stream = shake_128(b"%d:%d" % (vocabulary.seed, hash_id)).digest(_BYTES)
    size = vocabulary.size
    return array("I", [word % size for word in memoryview(stream).cast("I")])


@lru_cache(maxsize=_CACHED_BLOCKS)
def _block_json(hash_id: int, vocabulary: Vocabulary) -> bytes:
    return _joined(_block(hash_id, vocabulary))


def _joined(tokens: array[int]) -> bytes:
    return msgspec.json.encode(tokens.tolist())[1:-1]
