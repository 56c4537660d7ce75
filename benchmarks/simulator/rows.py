"""What one line of the evaluation is, and how figures of several seeds become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from setups import Traces


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    kind: str
    """reproduce: a figure of the papers; goal: what is wanted beyond them; report: told, not judged."""
    expected: str
    ours: float
    holds: bool
    spread: tuple[float, float] | None = None
    """The least and the most over the seeds."""
    setup: str = ""
    """Trace, nodes, speed, ticks, shared store: what it takes to run it again."""

    def document(self) -> dict[str, Any]:
        """For machines."""
        low_high = None if self.spread is None else [round(each, 4) for each in self.spread]
        return {
            "name": self.name, "kind": self.kind, "expected": self.expected, "ours": round(self.ours, 4),
            "holds": self.holds, "range": low_high, "setup": self.setup,
        }  # fmt: skip


Group = Callable[[Traces], Iterator[Row]]


@dataclass(frozen=True)
class Found:
    """One figure of several seeds."""

    median: float
    spread: tuple[float, float]

    def row(
        self, name: str, kind: str, expected: str, holds: Callable[[float], bool], setup: str = ""
    ) -> Row:
        """The row that it makes."""
        return Row(name, kind, expected, self.median, bool(holds(self.median)), self.spread, setup)


def found(values: Sequence[float]) -> Found:
    """The median of the seeds, and how far they lie apart."""
    return Found(median(values), (min(values), max(values)))


def quotient(ours: Sequence[float], theirs: Sequence[float]) -> Found:
    """Median over median; the range is that of seed beside seed."""
    pairs = [one / max(other, 1e-12) for one, other in zip(ours, theirs, strict=True)]
    return Found(median(ours) / max(median(theirs), 1e-12), (min(pairs), max(pairs)))
