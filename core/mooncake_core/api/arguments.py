"""What a user writes into `engine.args`, as far as others than the engine go by it."""

from __future__ import annotations

import re
from collections.abc import Sequence


def number_of(arguments: Sequence[str], flag: str) -> int | None:
    """Value of a flag; None when it is absent or not a plain number."""
    value = text_of(arguments, flag)
    return int(value) if value is not None and re.fullmatch(r"[0-9]+", value) else None


def text_of(arguments: Sequence[str], flag: str) -> str | None:
    """Value of a flag written as `--flag=5` or `--flag 5`; the last one counts."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = text if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return value


def hbm_tokens(arguments: Sequence[str], block_size_tokens: int) -> int | None:
    """KV tokens that an instance is told to hold in HBM; None = as many as fit."""
    if blocks := number_of(arguments, "--num-gpu-blocks-override"):
        # One block is vLLM's null block, which holds nothing.
        return max(blocks - 1, 0) * block_size_tokens
    return None
