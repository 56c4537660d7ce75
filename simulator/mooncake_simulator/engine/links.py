"""A link whose bandwidth concurrent flows share evenly: a NIC, a PCIe path, an SSD."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class FairLink:
    """Processor sharing in model time; pure. Bytes are carried as the clock is advanced."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0.0
        self._at_s = 0.0
        self._left: dict[int, float] = {}
        self._next_flow = 0

    @property
    def flows(self) -> int:
        """Flows under way."""
        return len(self._left)

    def start(self, size_bytes: float, now_s: float) -> int:
        """Begin a flow; returns its number."""
        self.advance(now_s)
        self._next_flow += 1
        self._left[self._next_flow] = size_bytes
        return self._next_flow

    def cancel(self, flow: int, now_s: float) -> None:
        """Stop a flow early; one that has ended is ignored."""
        self.advance(now_s)
        self._left.pop(flow, None)

    def next_end_s(self) -> float | None:
        """When the first flow will end if none joins or leaves; None = no flows."""
        if not self._left:
            return None
        return self._at_s + min(self._left.values()) * len(self._left) / self.bytes_per_s

    def advance(self, now_s: float) -> list[int]:
        """Carry bytes until `now_s`; returns the flows that ended on the way, in order."""
        ended: list[int] = []
        while self._left:
            end_s = self.next_end_s()
            assert end_s is not None
            if end_s > now_s:
                break
            self._carry(end_s)
            done = [flow for flow, left in self._left.items() if left <= 1e-6]
            # Rounding may leave a crumb on the flow that defined the end: it has ended all the same.
            done = done or [min(self._left, key=self._left.__getitem__)]
            for flow in done:
                del self._left[flow]
            ended += done
        self._carry(now_s)
        return ended

    def _carry(self, until_s: float) -> None:
        if self._left and until_s > self._at_s:
            each = (until_s - self._at_s) * self.bytes_per_s / len(self._left)
            for flow in self._left:
                self._left[flow] -= each
            self.carried_bytes += each * len(self._left)
        self._at_s = max(self._at_s, until_s)


class SharedLink:
    """A `FairLink` that coroutines wait on."""

    def __init__(self, bytes_per_s: float, now_s: Callable[[], float], time_scale: float) -> None:
        self._link = FairLink(bytes_per_s)
        self._now_s = now_s
        self._time_scale = time_scale
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def flows(self) -> int:
        """Flows under way."""
        return self._link.flows

    async def carry(self, size_bytes: float) -> None:
        """Return when so many bytes have gone over the link, beside whatever else flows."""
        if size_bytes <= 0:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # One reading of the clock for both: a flow that ended between two would end for nobody.
        now_s = self._now_s()
        self._settle(now_s)
        flow = self._link.start(size_bytes, now_s)
        self._ends[flow] = done
        self._arm()
        try:
            await done
        finally:
            if self._ends.pop(flow, None) is not None:
                now_s = self._now_s()
                self._settle(now_s)
                self._link.cancel(flow, now_s)
                self._arm()

    def _settle(self, now_s: float) -> None:
        for flow in self._link.advance(now_s):
            done = self._ends.pop(flow, None)
            if done is not None and not done.done():
                done.set_result(None)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end_s = self._link.next_end_s()
        if end_s is not None:
            delay_s = max(0.0, (end_s - self._now_s()) / self._time_scale)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._settle(self._now_s())
        self._arm()
