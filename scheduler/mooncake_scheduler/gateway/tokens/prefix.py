"""What placing needs to know of a prompt."""

from __future__ import annotations

from array import array
from typing import NamedTuple

_NO_KEYS = array("Q")


class Prefix(NamedTuple):
    """A prompt as the Conductor sees it."""

    tokens: int
    """Its length."""
    keys: array[int] = _NO_KEYS
    """Keys of its full blocks; empty where its ids are not known."""
    ids_json: bytes | None = None
    """Its ids as JSON, where the prompt goes on as ids instead of text."""
