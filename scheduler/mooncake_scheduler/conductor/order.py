"""Who goes next at a prefill instance, among those that wait there.

Shortest first gives the least mean time to first token, and two things bound it. *Ageing*: every second that
a prefill has waited counts as so many seconds less of computing, so it is overtaken only by what comes soon
after it. *Promises*: an order in which a TTFT promised at admission would be broken is not taken, as long as
there is one that keeps them all. Of the orders that keep them, backward scheduling finds the one of least
mean completion time (W. E. Smith, "Various optimizers for single-stage production", Naval Research Logistics
Quarterly 3, 1956): of those that may end as late as all the rest together, the longest goes last.

Pure: the order depends on nothing but what the ledger tells every scheduler, so all of them agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import msgspec

from mooncake_core.ledger import InstanceLoad, Waiting

AGEING = 0.3
"""Seconds of computing that a second of waiting makes up for."""
ROUNDING_S = 1e-3
"""Late by no more than that is in time: moments of many seconds are added up in floating point."""


class Joined(NamedTuple):
    """What joining a queue means."""

    queue_s: float
    """Seconds until its turn."""
    behind: int
    """How many that wait will have to wait for it too."""


class QueueOrder(msgspec.Struct, frozen=True):
    """Shortest first, with ageing and kept promises."""

    ageing: float = AGEING

    def __post_init__(self) -> None:
        if not self.ageing > 0:
            raise ValueError(
                f"ageing is more than 0 seconds a second, not {self.ageing}: else some wait for ever"
            )

    def sequence(self, waiting: Sequence[Waiting], begin_s: float) -> list[Waiting]:
        """All that wait, in the order of their turns.

        Args:
            waiting: At one instance, in any order.
            begin_s: When the instance will be free for the first of them.
        """
        ranked = sorted(waiting, key=self._rank)
        if _least_slack_s(ranked, begin_s) >= -ROUNDING_S:
            return ranked
        return _backward(ranked, begin_s)

    def join(self, load: InstanceLoad, newcomer: Waiting, now_s: float) -> Joined:
        """Where a newcomer would come in, the promises to the others kept.

        Args:
            load: Of the instance, without the newcomer.
            newcomer: With the promise that is to be given to it, or none (inf).
            now_s: The moment.
        """
        waiting, handed_over_s = load.waiting, load.handed_over_s
        if not waiting:
            return Joined(handed_over_s, 0)
        if newcomer.latest_end_s == inf and all([each.latest_end_s == inf for each in waiting]):
            # Where nothing is promised the rank alone decides, and nobody has to be sorted for one place.
            rank = self._rank(newcomer)
            ahead = [each.cost_us for each in waiting if self._rank(each) <= rank]
            return Joined(handed_over_s + sum(ahead) / 1e6, len(waiting) - len(ahead))
        sequence = self.sequence((*waiting, newcomer), now_s + handed_over_s)
        at = next(at for at, each in enumerate(sequence) if each is newcomer)
        return Joined(
            handed_over_s + sum([each.cost_us for each in sequence[:at]]) / 1e6, len(sequence) - at - 1
        )

    def earliest_end_s(self, load: InstanceLoad, cost_s: float, now_s: float) -> float:
        """The least time by which a newcomer can have ended with all promises to the others kept.

        Whoever has no promise, or a broken one, is not put off for one that is still to be given: else a row
        of urgent newcomers could keep it waiting for ever.
        """
        begin_s = now_s + load.handed_over_s
        by_due = sorted((_due_s(each, begin_s), each) for each in load.waiting)
        end_s = begin_s + sum([each.cost_us for due_s, each in by_due if due_s == inf]) / 1e6
        earliest_s = end_s + cost_s
        for due_s, each in by_due:
            if due_s == inf:
                break
            end_s += each.cost_us / 1e6
            if end_s + cost_s > due_s + ROUNDING_S:
                earliest_s = end_s + cost_s
        return earliest_s

    def slack_s(self, load: InstanceLoad, newcomer: Waiting, now_s: float) -> float:
        """Seconds of work that may come before all that wait and the newcomer with no promise broken."""
        begin_s = now_s + load.handed_over_s
        return max(0.0, _least_slack_s(self.sequence((*load.waiting, newcomer), begin_s), begin_s))

    def can_wait(self, waiting: Sequence[Waiting], begin_s: float, until_s: float) -> bool:
        """Whether turns may begin only later without a promise broken that could be kept.

        Args:
            waiting: At one instance, in any order.
            begin_s: When it could compute the first of them.
            until_s: When it will, because it does something else first, or nothing.
        """
        end_s = until_s
        for each in self.sequence(waiting, until_s):
            end_s += each.cost_us / 1e6
            # Due as it was before: what the wait itself breaks must not pass for broken anyhow.
            if each.latest_end_s + ROUNDING_S < end_s and _due_s(each, begin_s) < inf:
                return False
        return True

    def turn(self, load: InstanceLoad, now_s: float, lead_s: float) -> Waiting | None:
        """Whose turn it is; None while what was handed over keeps the instance busy, or nobody waits.

        Args:
            load: Of the instance.
            now_s: The moment.
            lead_s: Seconds before the instance is free at which the next is handed over.
        """
        if not load.waiting:
            return None
        handed_over_s = load.handed_over_s
        if handed_over_s > lead_s:
            return None
        return self.sequence(load.waiting, now_s + handed_over_s)[0]

    def _rank(self, each: Waiting) -> tuple[float, Waiting]:
        # Its cost less what it has waited for, but for a term that is the same for all.
        return each.cost_us / 1e6 + self.ageing * each.reserved_s, each


def _due_s(each: Waiting, begin_s: float) -> float:
    """When it has to end. A promise that is broken whatever is done binds no more: something has failed."""
    latest_end_s = each.latest_end_s
    return latest_end_s if begin_s + each.cost_us / 1e6 <= latest_end_s + ROUNDING_S else inf


def _least_slack_s(sequence: Sequence[Waiting], begin_s: float) -> float:
    """How much earlier than it has to the tightest of a sequence ends; negative when a promise is broken."""
    least_s, end_s = inf, begin_s
    for each in sequence:
        end_s += each.cost_us / 1e6
        if each.latest_end_s - end_s < least_s:
            least_s = min(least_s, _due_s(each, begin_s) - end_s)
    return least_s


def _backward(ranked: Sequence[Waiting], begin_s: float) -> list[Waiting]:
    """From the last place to the first: of those that may end then, the one of the highest rank.

    Where nobody may, the one that may end latest: then the worst is late by as little as can be.
    """
    end_s = begin_s + sum([each.cost_us for each in ranked]) / 1e6
    left = sorted((_due_s(each, begin_s), at) for at, each in enumerate(ranked))
    may_end: list[int] = []
    found: list[Waiting] = []
    while left or may_end:
        while left and left[-1][0] + ROUNDING_S >= end_s:
            heappush(may_end, -left.pop()[1])
        chosen = ranked[-heappop(may_end) if may_end else left.pop()[1]]
        found.append(chosen)
        end_s -= chosen.cost_us / 1e6
    found.reverse()
    return found
