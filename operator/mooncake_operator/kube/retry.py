"""Which requests are sent again, and after how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_operator.kube.errors import KubeError, ThrottledError, UnavailableError

Chance = Callable[[], float]
"""A number of [0, 1)."""


@dataclass(frozen=True, slots=True)
class RetryRules:
    """Short retries inside one request; longer patience is the work queue's."""

    attempts: int = 4
    base_s: float = 0.2
    longest_wait_s: float = 5.0

    def wait_s(self, attempt: int, error: KubeError, *, repeatable: bool, chance: Chance) -> float | None:
        """Seconds until the next attempt; None = give up.

        Args:
            attempt: attempts made so far, from 1.
            error: how the last one ended.
            repeatable: whether carrying the request out twice is as good as once.
            chance: spreads the waits of many.
        """
        if attempt >= self.attempts:
            return None
        # A throttled request was not looked at, hence may be sent again whatever it was.
        if not isinstance(error, ThrottledError) and not (repeatable and isinstance(error, UnavailableError)):
            return None
        if error.retry_after_s is not None and error.retry_after_s > self.longest_wait_s:
            return None
        wait_s = self.base_s * 2.0 ** (attempt - 1) * (0.75 + 0.5 * chance())
        return min(self.longest_wait_s, max(wait_s, error.retry_after_s or 0.0))
