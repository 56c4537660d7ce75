"""How far predictions of TTFT fall short, learned a class of instances at a time.

A request that is predicted to meet its target just so misses it as often as not. What keeps the promise is
the distribution of measured / predicted: where one in ten takes 1.3 times as long as predicted, nine in ten
of those predicted at target / 1.3 are in time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from msgspec.structs import replace

from mooncake_scheduler.conductor.cost import CostModels

MEMORY = 256
"""Predictions over which the distribution is taken."""
LEAST_SEEN = 32
MOST = 2.0
"""More than that is not made up for by leaving room: then the model is wrong, and fitting is what helps."""
LEAST_PART = 0.6
"""Of the largest prediction admitted that one has to reach to be looked at: for those near the limit room is
left, and what passes unseen (tokenising, the hand-over) would rule the ratio of short ones."""
_STEP = 0.02
"""A change smaller than this is not worth another cost model."""


class TtftMargins:
    """Keeps `CostModel.ttft_margin` in step with what is observed.

    Args:
        costs: where it is kept.
        percentile: of the requests that are to meet the target, 1 to 100.
    """

    def __init__(self, costs: CostModels, percentile: int) -> None:
        self._costs = costs
        self._share = percentile / 100
        self._seen: dict[str, _Ratios] = {}

    def observe(self, instance_class: str, predicted_s: float, seconds: float, target_s: float) -> None:
        """A first token was predicted, and came.

        Args:
            instance_class: of the instance that computed the prompt.
            predicted_s: as it was when the request was admitted.
            seconds: what it took.
            target_s: what was promised.
        """
        model = self._costs.of_class(instance_class)
        if predicted_s < LEAST_PART * target_s / model.ttft_margin or predicted_s <= 0:
            return
        ratios = self._seen.get(instance_class)
        if ratios is None:
            ratios = self._seen[instance_class] = _Ratios()
        ratios.add(seconds / predicted_s)
        if ratios.count < LEAST_SEEN:
            return
        margin = min(MOST, max(1.0, ratios.quantile(self._share)))
        if abs(margin - model.ttft_margin) > _STEP * model.ttft_margin:
            self._costs.replace(instance_class, replace(model, ttft_margin=margin))


class _Ratios:
    """The last values, by age and by size."""

    __slots__ = ("_by_age", "_by_size")

    def __init__(self) -> None:
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []

    @property
    def count(self) -> int:
        return len(self._by_age)

    def add(self, ratio: float) -> None:
        if len(self._by_age) == MEMORY:
            del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]
        self._by_age.append(ratio)
        insort(self._by_size, ratio)

    def quantile(self, share: float) -> float:
        """The smallest value that so many of all do not exceed."""
        return self._by_size[min(self.count - 1, int(share * self.count))]
