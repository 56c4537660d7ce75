"""What a reconciler is to those who call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Key(NamedTuple):
    """A cluster; its pools, Pods and other objects are reconciled with it."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """As kubectl users know it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Result:
    """How a pass ended."""

    requeue_after_s: float | None = None
    """When to look again though nothing may have changed; None = at the next event or resync."""


class Reconciler(Protocol):
    """Brings one object's world nearer to what is wanted.

    Level-based: a pass reads everything anew, and a pass after a complete one changes nothing. Whatever it
    raises leads to another pass after a back-off; what only a user can mend is no error but a condition.
    """

    async def reconcile(self, key: Key) -> Result:
        """One pass."""
