"""Server-side scripts, known to Redis by their digest."""

from __future__ import annotations

from hashlib import sha1


class Script:
    """Source of a Lua script and the SHA-1 under which Redis knows it once it was loaded."""

    __slots__ = ("sha", "source")

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.sha = sha1(self.source, usedforsecurity=False).hexdigest().encode()
