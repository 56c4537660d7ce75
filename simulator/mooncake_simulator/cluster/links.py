"""Network and disks: what leaves a node waits for what is leaving it already."""

from __future__ import annotations


class Link:
    """One direction of one node's NICs (or its disk): first come, first served, at full rate each.

    Two transfers that share a link evenly end, on the whole, when the second of two in a row does.

    Args:
        bytes_per_s: its rate.
    """

    __slots__ = ("_bytes_per_s", "_ends_s", "_free_s", "bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._ends_s: list[float] = []
        self.bytes = 0.0

    def send(self, size_bytes: float, now_s: float) -> float:
        """Send; returns when the last byte has left."""
        end_s = self.hand_over(size_bytes, now_s)
        self._ends_s.append(end_s)
        return end_s

    def hand_over(self, size_bytes: float, now_s: float) -> float:
        """As `send`, of what no router counts: it is not among `flows`."""
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + size_bytes / self._bytes_per_s
        self.bytes += size_bytes
        return self._free_s

    @property
    def free_s(self) -> float:
        """When all that it was given will have left."""
        return self._free_s

    def flows(self, now_s: float) -> int:
        """Transfers that have not ended, as far as a router knows of them."""
        ends_s = self._ends_s
        if ends_s and ends_s[0] <= now_s:
            self._ends_s = ends_s = [end_s for end_s in ends_s if end_s > now_s]
        return len(ends_s)
