"""kopf's memories, left empty.

Before it calls any handler, kopf works out how an object differs from when it was last handled: two deep
copies of the object for each event, though handlers of `on.event` are never told. On a thousand Pods that was
most of what the operator's watching cost. These storages have nothing to remember, hence nothing to compare.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Keeps no last-handled state."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object is worth comparing."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """There was nothing before."""
        return None

    def store(self, **_: Any) -> None:
        """Write nothing to the object."""


class NoProgress(kopf.ProgressStorage):
    """Keeps no progress of handlers; the queue has its own."""

    def fetch(self, **_: Any) -> None:
        """No handler is ever in the middle of anything."""

    def store(self, **_: Any) -> None:
        """Write nothing to the object."""

    def purge(self, **_: Any) -> None:
        """There is nothing to take away."""

    def touch(self, **_: Any) -> None:
        """Write nothing to the object."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Nothing of ours is in it."""
        return essence
