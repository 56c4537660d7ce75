"""Faults on demand: what a router must survive, switched on over HTTP or by environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class FaultError(Exception):
    """A fault document that cannot be understood; the message names the field."""


class Faults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Faults now in force; a new document replaces the fields it names. Counters count down to 0 = off."""

    die_after_tokens: int | None = None
    """The process kills itself (SIGKILL) after generating so many more tokens."""
    break_stream_after_tokens: int | None = None
    """Every stream's connection is broken after so many of its tokens."""
    status_503_retry_after: float | None = None
    """Every generation request is answered 503 with this Retry-After (seconds)."""
    status_500: int = 0
    """So many generation requests are answered 500."""
    fail_prefill: int = 0
    """So many requests with `do_remote_decode` are answered 500."""
    hang: bool = False
    """Generation requests are taken and never answered."""
    stall_s: float = 0.0
    """The engine stands still for so many wall seconds, once."""
    drop_events: int = 0
    """So many event batches are not published; they can be replayed."""
    lose_events: int = 0
    """So many event batches are neither published nor kept for replay."""
    eos_after_tokens: int | None = None
    """Answers end with the end token after so many tokens (0: it is the first)."""
    unhealthy: bool = False
    """`/health` answers 503."""

    def update(self, document: Mapping[str, Any]) -> None:
        """Switch faults on and off.

        Raises:
            FaultError: an unknown field, or a value of the wrong type.
        """
        try:
            checked = msgspec.convert(dict(document), Faults)
        except msgspec.ValidationError as error:
            raise FaultError(str(error)) from error
        for name in document:
            setattr(self, name, getattr(checked, name))

    def take(self, name: str) -> bool:
        """Use up one of a counted fault; False when it is off."""
        left: int = getattr(self, name)
        if left < 1:
            return False
        setattr(self, name, left - 1)
        return True
