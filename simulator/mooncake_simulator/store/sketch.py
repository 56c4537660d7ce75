"""How often keys were looked up, in room that does not grow.

A count-min sketch (Cormode, Muthukrishnan 2005, "An improved data stream summary").
"""

from __future__ import annotations

from hashlib import blake2b

ROWS = 4
WIDTH = 4096
DECAY_AFTER = ROWS * WIDTH
"""Lookups after which all counts are halved; size and decay are those of Mooncake 0.3.13's master."""
_MOST = 255


class LookupCounts:
    """Counts that are never too low between two decays, and too high where keys meet in every row."""

    def __init__(self) -> None:
        self._rows = [bytearray(WIDTH) for _ in range(ROWS)]
        self._since_decay = 0

    def count(self, key: str) -> int:
        """Account for one lookup; returns how many there were, this one included, 255 at most."""
        digest = blake2b(key.encode(), digest_size=4 * ROWS).digest()
        least = _MOST
        for number, row in enumerate(self._rows):
            place = int.from_bytes(digest[4 * number : 4 * number + 4], "little") % WIDTH
            row[place] = min(row[place] + 1, _MOST)
            least = min(least, row[place])
        self._since_decay += 1
        if self._since_decay == DECAY_AFTER:
            self._halve()
        return least

    def _halve(self) -> None:
        self._rows = [bytearray(value >> 1 for value in row) for row in self._rows]
        self._since_decay = 0
