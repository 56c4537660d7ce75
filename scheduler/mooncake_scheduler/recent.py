"""What was measured lately: latencies of the last minutes, and how many of them kept their target.

Counters since the start say nothing about now, and the last thousand requests say nothing about when they
were. Slots of time do, at the cost of one count a request; sums over several schedulers are the cluster's.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mooncake_core.sketch import Sketch

SLOT_S = 10.0
WINDOWS_S = (60, 300)
"""Looked at together: what the longer one says of a change, the shorter one must confirm."""


class _Slot:
    __slots__ = ("judged", "kept", "number", "sketch")

    def __init__(self, number: int) -> None:
        self.number = number
        self.sketch = Sketch()
        self.judged = 0
        self.kept = 0


class Recent:
    """Values of one latency, in model seconds, by the wall clock's time of their measurement."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        """Begin empty."""
        self._slots: deque[_Slot] = deque(maxlen=int(max(WINDOWS_S) / SLOT_S))

    def observe(self, now_s: float, value_s: float, target_s: float | None) -> None:
        """Count a value and whether it keeps its own target, where it has one."""
        number = int(now_s / SLOT_S)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
        slot = self._slots[-1]
        slot.sketch.add(value_s)
        if target_s is not None:
            slot.judged += 1
            slot.kept += value_s <= target_s

    def window(self, now_s: float, seconds: float) -> dict[str, Any]:
        """The last `seconds`, as JSON: `count`, `judged`, `kept`, `sketch`."""
        oldest = int(now_s / SLOT_S) - int(seconds / SLOT_S) + 1
        slots = [slot for slot in self._slots if slot.number >= oldest]
        merged = Sketch()
        for slot in slots:
            merged.merge(slot.sketch)
        return {
            "count": len(merged),
            "judged": sum(slot.judged for slot in slots),
            "kept": sum(slot.kept for slot in slots),
            "sketch": merged.to_wire(),
        }
