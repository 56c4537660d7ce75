"""The trace format of the Mooncake paper (FAST'25, appendix A): one JSON object a line, without any text.

`{"timestamp": ms since the start, "input_length": tokens, "output_length": tokens, "hash_ids": [block, …]}`

A block is 512 tokens, the last one of a prompt may be partial; an id stands for its block and all before it,
so that equal ids mean an equal prefix up to there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec

BLOCK_TOKENS: Final = 512


class TraceError(ValueError):
    """A trace that cannot be read; the message begins with file and line."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace."""

    timestamp_ms: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="timestamp")
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of the prompt."""
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens to generate."""
    hash_ids: tuple[int, ...]
    """One id a block of the prompt, the last one partial."""


_decoder: Final = msgspec.json.Decoder(Request)
_encoder: Final = msgspec.json.Encoder()


def read_trace(path: Path, *, skip: int = 0, limit: int | None = None) -> list[Request]:
    """The requests of a trace in the order of the file.

    Args:
        path: the file.
        skip: leave out that many requests at the start.
        limit: at most that many requests.

    Raises:
        TraceError: the file cannot be read or a line is not a request.
    """
    try:
        with path.open("rb") as lines:
            return list(islice(_requests(lines, path), skip, None if limit is None else skip + limit))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _requests(lines: Iterable[bytes], path: Path) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            request = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        wanted = blocks_of(request.input_length)
        if len(request.hash_ids) != wanted:
            raise TraceError(
                f"{path}:{number}: {len(request.hash_ids)} hash_ids for an input_length of "
                f"{request.input_length}: expected {wanted}, one for each {BLOCK_TOKENS} tokens begun"
            )
        yield request


def write_trace(path: Path, requests: Iterable[Request]) -> int:
    """Write requests as a trace; returns how many.

    Raises:
        TraceError: the file cannot be written.
    """
    count = 0
    try:
        with path.open("wb") as file:
            for request in requests:
                file.write(_encoder.encode(_plain(request)) + b"\n")
                count += 1
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    return count


def blocks_of(tokens: int) -> int:
    """Blocks that a prompt of so many tokens begins."""
    return -(-tokens // BLOCK_TOKENS)


def jitter(requests: Sequence[Request], width_ms: float, seed: int) -> list[Request]:
    """Spread arrivals evenly over `width_ms` after their timestamp, in the order of the new arrivals.

    The conversation trace was recorded in ticks of 3 s with about ten requests each; with a width of 3 000 it
    becomes what was sent.
    """
    chance = random.Random(seed)
    moved = [
        msgspec.structs.replace(request, timestamp_ms=request.timestamp_ms + chance.uniform(0, width_ms))
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.timestamp_ms)


def _plain(request: Request) -> Request:
    """Timestamps as whole milliseconds, as in the released traces."""
    return msgspec.structs.replace(request, timestamp_ms=round(request.timestamp_ms))
