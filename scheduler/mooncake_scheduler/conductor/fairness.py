"""Who is refused first near the limit: low priority, and tenants with more than their share of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log

HALF_LIFE_S = 60.0
MOST_TENANTS = 4096
LEAST_TENANT_SHARE = 0.8
"""Part of the limits that a tenant may fill however far it is over its share."""
PRIORITY_STEP = 0.1
"""Part of the limits that each priority class under the floor loses."""
LEAST_SHARE = 0.5


class FairShare:
    """Tokens given to each tenant, fading with a half-life, against what its weight entitles it to.

    Fairness is between tenants that ask: a tenant alone may take all there is, and the share of one that has
    gone quiet passes to the others as its tokens fade.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, half_life_s: float = HALF_LIFE_S) -> None:
        """Takes the weight of each tenant (1 where none is given), and how fast tokens are forgotten."""
        self._weights: dict[str, float] = {}
        self.set_weights(weights or {})
        self._rate = log(2) / half_life_s
        self._tokens: dict[str, tuple[float, float]] = {}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Take other weights; the tokens given so far stay.

        Raises:
            ValueError: one is not above 0; then none is taken.
        """
        for tenant, weight in weights.items():
            if weight <= 0:
                raise ValueError(f"tenant {tenant}: its weight has to be above 0, not {weight}")
        self._weights = dict(weights)

    def charge(self, tenant: str, tokens: int, now_s: float) -> None:
        """Count tokens that a tenant was given."""
        if tenant not in self._tokens and len(self._tokens) >= MOST_TENANTS:
            self._forget_least(now_s)
        self._tokens[tenant] = (self.tokens(tenant, now_s) + tokens, now_s)

    def tokens(self, tenant: str, now_s: float) -> float:
        """What is left of the tokens that a tenant was given."""
        tokens, since_s = self._tokens.get(tenant, (0.0, now_s))
        return tokens * exp(-self._rate * max(0.0, now_s - since_s))

    def excess(self, tenant: str, now_s: float) -> float:
        """How far a tenant is over its fair share: 0 = not, 1 = it has twice its share.

        The share is that among tenants with at least one token left, this one included.
        """
        mine = self.tokens(tenant, now_s)
        if mine < 1:
            return 0.0
        total = weights = 0.0
        for each in self._tokens:
            tokens = self.tokens(each, now_s)
            if tokens >= 1:
                total += tokens
                weights += self._weight(each)
        fair = total * self._weight(tenant) / weights
        return max(0.0, mine / fair - 1)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_least(self, now_s: float) -> None:
        least, least_tokens = "", inf
        for tenant in self._tokens:
            tokens = self.tokens(tenant, now_s)
            if tokens < least_tokens:
                least, least_tokens = tenant, tokens
        del self._tokens[least]


def priority_share(priority: int, floor: int) -> float:
    """The part of the limits that a request of this priority may fill: all at the floor and above it."""
    return 1.0 if priority >= floor else max(LEAST_SHARE, 1.0 - PRIORITY_STEP * (floor - priority))


def tenant_share(excess: float) -> float:
    """The part of the limits that a tenant with this excess may fill."""
    return 1.0 - (1.0 - LEAST_TENANT_SHARE) * min(1.0, excess)
