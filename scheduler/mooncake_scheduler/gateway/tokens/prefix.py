"""What placing needs to know of a prompt."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from mooncake_core.blocks import block_keys

_NO_KEYS = array("Q")


class Prefix(NamedTuple):
    """A prompt as the Conductor sees it."""

    tokens: int
    """Its length."""
    keys: array[int] = _NO_KEYS
    """Keys of its full blocks; empty where its ids are not known."""
    ids_json: bytes | None = None
    """Its ids as JSON, where the prompt goes on as ids instead of text."""


class Domain(NamedTuple):
    """Within what block keys are equal: prompts of another LoRA or salt share nothing."""

    block_size_tokens: int
    lora_name: str | None = None
    cache_salt: str | None = None

    def keys(self, ids: array[int]) -> array[int]:
        """Keys of a prompt's full blocks."""
        return block_keys(ids, self.block_size_tokens, lora_name=self.lora_name, cache_salt=self.cache_salt)
