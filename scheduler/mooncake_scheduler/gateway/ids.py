"""Request ids: the client's own is kept for it, engines get one that this process makes."""

from __future__ import annotations

import os
import re
from itertools import count
from typing import Final

_PLAIN: Final = re.compile(rb"[\x21-\x7e]{1,128}\Z")


class RequestIds:
    """Makes ids that no other process makes."""

    def __init__(self) -> None:
        self._prefix = os.urandom(6).hex()
        self._numbers = count()

    def new(self) -> str:
        """A new id: 16 hex digits or a few more."""
        return f"{self._prefix}{next(self._numbers):04x}"


def kept(sent: bytes | None) -> str | None:
    """The client's id where it can be kept: printable and not too long."""
    if sent is None or _PLAIN.match(sent) is None:
        return None
    return sent.decode("ascii")
