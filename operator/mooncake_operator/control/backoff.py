"""How long a key waits after each failure in a row."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_MOST_DOUBLINGS = 30


class Backoff(Generic[Key]):
    """Doubling waits, each key for itself, spread so that keys that failed together part."""

    def __init__(
        self, *, first_s: float = 0.2, longest_s: float = 300.0, chance: Callable[[], float]
    ) -> None:
        """Take the waits' bounds, in seconds, and a source of numbers of [0, 1)."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._chance = chance
        self._failures: dict[Key, int] = {}

    def failed(self, key: Key) -> float:
        """Count a failure; returns how many seconds to wait, between half and all of the doubled wait."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = min(self._longest_s, self._first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
        return wait_s * (0.5 + 0.5 * self._chance())

    def failures(self, key: Key) -> int:
        """Failures in a row."""
        return self._failures.get(key, 0)

    def forget(self, key: Key) -> None:
        """Start over, after a success or because the object is gone."""
        self._failures.pop(key, None)
