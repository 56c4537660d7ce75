"""What the simulated model says: a fixed function of prompt, position and seed.

A prefill engine, a decode engine and one engine alone therefore give the same tokens, as real engines with
greedy sampling do, and a hand-over that lost or mixed up requests shows.
"""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Sequence

import xxhash

from mooncake_simulator.engine.sequence import NextToken

_END_AGAIN_TOKENS = 16


def prompt_digest(tokens: Sequence[int]) -> int:
    """64 bits that stand for a prompt."""
    packed = array.array("Q", tokens)
    if sys.byteorder != "little":
        packed.byteswap()
    return int(xxhash.xxh3_64_intdigest(packed.tobytes(), seed=0))


def output_of(
    prompt: Sequence[int],
    *,
    seed: int,
    vocabulary: Sequence[int],
    eos_token: int | None,
    mean_output_tokens: int,
    eos_after: int | None = None,
) -> NextToken:
    """The model's answer to a prompt.

    The answer's natural length is exponentially distributed around `mean_output_tokens` (0 = endless): there
    the model gives the end token, and now and then again when it is not heeded. `eos_after` fixes the length.
    """
    digest = prompt_digest(prompt) ^ (seed & ((1 << 64) - 1))
    size = len(vocabulary)

    def drawn(position: int) -> int:
        return int(xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), seed=position))

    end = eos_after
    if end is None and mean_output_tokens > 0:
        share = (drawn((1 << 63) + 1) + 1) / ((1 << 64) + 1)
        end = 1 + int(-math.log(share) * mean_output_tokens)

    def next_token(position: int) -> int:
        if eos_token is not None and end is not None and position >= end:
            past_end = position - end
            if past_end % _END_AGAIN_TOKENS == 0:
                return eos_token
        return vocabulary[drawn(position) % size]

    return next_token
