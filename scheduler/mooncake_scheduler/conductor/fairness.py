"""Who is refused first near the limit: low priority, and tenants with more than their share of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import exp, inf, log

HALF_LIFE_S = 60.0
MOST_TENANTS = 4096
LEAST_TENANT_SHARE = 0.8
"""Part of the limits that a tenant may fill however far it is over its share,"""
LEAST_BESIDE_WANTING = 0.5
"""and while another that has less than its share is refused: what it asks for at once may be large."""
PRIORITY_STEP = 0.1
"""Part of the limits that each priority class under the floor loses."""
LEAST_SHARE = 0.5


class FairShare:
    """Tokens given to each tenant, fading with a half-life, against what its weight entitles it to.

    Fairness is between tenants that ask, in vain or not. A tenant alone may take all there is; the share of
    one that has gone quiet passes to the others as its tokens fade.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, half_life_s: float = HALF_LIFE_S) -> None:
        """Takes the weight of each tenant (1 where none is given), and how fast tokens are forgotten."""
        self._weights: dict[str, float] = {}
        self.set_weights(weights or {})
        self._rate = log(2) / half_life_s
        self._tokens: dict[str, tuple[float, float]] = {}
        self._half_life_s = half_life_s
        self._refused_s: dict[str, float] = {}

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

    def refuse(self, tenant: str, now_s: float) -> None:
        """Note that a tenant asked in vain: it wants its share from now on, for a half-life."""
        self._refused_s.pop(tenant, None)
        if len(self._refused_s) >= MOST_TENANTS:
            del self._refused_s[next(iter(self._refused_s))]
        self._refused_s[tenant] = now_s

    def tokens(self, tenant: str, now_s: float) -> float:
        """What is left of the tokens that a tenant was given."""
        tokens, since_s = self._tokens.get(tenant, (0.0, now_s))
        return tokens * exp(-self._rate * max(0.0, now_s - since_s))

    def excess(self, tenant: str, now_s: float) -> float:
        """How far a tenant is over its fair share: 0 = not, 1 = it has twice its share.

        The share is that among tenants with at least one token left, this one included, and those that were
        refused lately.
        """
        mine = self.tokens(tenant, now_s)
        return 0.0 if mine < 1 else max(0.0, mine / (self._fair(now_s) * self._weight(tenant)) - 1)

    def part(self, tenant: str, now_s: float) -> float:
        """The part of the limits that a tenant may fill now."""
        excess = self.excess(tenant, now_s)
        return 1.0 if excess == 0 else tenant_share(excess, self._hunger(now_s))

    def _fair(self, now_s: float) -> float:
        """Tokens that a weight of 1 is entitled to, of all that was given."""
        total = weights = 0.0
        wanting = self._wanting(now_s)
        for each in self._tokens:
            tokens = self.tokens(each, now_s)
            if tokens >= 1 or each in wanting:
                total += tokens
                weights += self._weight(each)
        for each in wanting:
            if each not in self._tokens:
                weights += self._weight(each)
        return total / weights if weights else 0.0

    def _hunger(self, now_s: float) -> float:
        """What the worst off of those refused lately lacks of its share: 0 = nothing, 1 = all of it."""
        fair = self._fair(now_s)
        if fair <= 0:
            return 0.0
        return max(
            (1.0 - self.tokens(each, now_s) / (fair * self._weight(each)) for each in self._wanting(now_s)),
            default=0.0,
        )

    def _wanting(self, now_s: float) -> Collection[str]:
        """Who was refused within the last half-life; in order of time, so that the old ones come first."""
        refused_s = self._refused_s
        while refused_s:
            first = next(iter(refused_s))
            if now_s - refused_s[first] <= self._half_life_s:
                break
            del refused_s[first]
        return refused_s.keys()

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


def tenant_share(excess: float, hunger: float = 0.0) -> float:
    """The part of the limits that a tenant with this excess may fill, beside one with this hunger.

    Args:
        excess: How far it is over its share; above 0.
        hunger: What another lacks of its own, though it asks for it: 0 to 1.
    """
    given_up = (1.0 - LEAST_TENANT_SHARE) * min(1.0, excess)
    return 1.0 - max(given_up, (1.0 - LEAST_BESIDE_WANTING) * hunger)
