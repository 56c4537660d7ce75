"""What an index counts of its own work, for metrics."""

from __future__ import annotations

from dataclasses import dataclass

CHECKS = 8
"""Places a match looks at for holes, beyond those of the search."""


@dataclass(slots=True)
class IndexStats:
    """Totals since the start of the process."""

    matches: int = 0
    looks: int = 0
    """Blocks looked at by matches."""
    holes: int = 0
    """Matches that found a holder lacking a block before one it holds."""
    overflows: int = 0
    """Matches that met a block with more holders than can be listed."""

    def count(self, *, looks: int, holes: int, overflows: int) -> None:
        """Add one match."""
        self.matches += 1
        self.looks += looks
        self.holes += holes
        self.overflows += overflows
