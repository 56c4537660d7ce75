"""How a request will fare that has no place to decode yet: predicted at its arrival, from how others fared.

Where decode is full, what becomes free goes to whoever of those who wait it is large enough for. So the size
of a request decides how long it waits, and the order of arrival hardly does: on the conversation trace with
two decode instances that are full, an ordinary queue's wait tells those who found no place from those who did
as well as a coin (AUC 0.49), and the KV tokens needed tell it nearly always (0.985). The size from which on
there is no place in time moves with the load, so it is learned from those who waited just now.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import NamedTuple

MEMORY = 256
"""Requests that are remembered,"""
MEMORY_S = 60.0
"""and for how long: then one is let try again."""
LEAST_SEEN = 8
"""Requests lately before they say anything."""
NEAREST = 4
"""Requests nearest in size whose wait is expected."""
LEAST_CHANCE = 0.01
"""Of finding a place in time that a request needs to be admitted where decode is full. Small: who is refused
here is lost for certain, who is let in wrongly costs a prefill; and refusing by the dozen what takes the most
prefill makes the prefill load swing (ADR 32)."""


class _Fared(NamedTuple):
    at_s: float
    need_tokens: int
    wait_s: float
    found: bool


class PlaceWaits:
    """Waits for a place to decode, by KV tokens needed."""

    def __init__(self) -> None:
        self._fared: deque[_Fared] = deque(maxlen=MEMORY)

    def observe(self, need_tokens: int, wait_s: float, now_s: float, *, found: bool) -> None:
        """A prefilled request got a place after so long, or was given up then."""
        self._fared.append(_Fared(now_s, need_tokens, wait_s, found))

    def chance(self, need_tokens: int, within_s: float, now_s: float) -> float | None:
        """The chance to find a place within so many seconds; None where too few waited lately to tell.

        Who needed as much and found one in that time speaks for it, who needed no more and did not, against.
        Where neither is known it is as likely as not (Jeffreys' prior: half a request each); 50 that found
        none make it next to hopeless. It never grows as the time gets shorter.
        """
        found = lost = lately = 0
        for at_s, needed, wait_s, has_found in self._fared:
            if now_s - at_s > MEMORY_S:
                continue
            lately += 1
            if has_found and wait_s <= within_s:
                found += needed >= need_tokens
            else:
                lost += needed <= need_tokens
        return (found + 0.5) / (found + lost + 1) if lately >= LEAST_SEEN else None

    def expected_s(self, need_tokens: int, now_s: float) -> float:
        """Seconds that one like it waits: the median of those nearest in size who found a place lately."""
        found = [
            (abs(each.need_tokens - need_tokens), each.wait_s)
            for each in self._fared
            if each.found and now_s - each.at_s <= MEMORY_S
        ]
        if not found:
            return 0.0
        found.sort()
        return median_low([wait_s for _, wait_s in found[:NEAREST]])
