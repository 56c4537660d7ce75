"""The two kinds of leg: one whose answer is gathered, and one whose answer flows on to the client."""

from __future__ import annotations

import time

from mooncake_scheduler.gateway.answers import EventStream, error_of
from mooncake_scheduler.gateway.flow import Flow, park
from mooncake_scheduler.gateway.http1 import Call, Exchange, Fault, FaultKind
from mooncake_scheduler.gateway.http1.heads import EVENT_STREAM
from mooncake_scheduler.gateway.http1.simple import MAX_ANSWER_BYTES
from mooncake_scheduler.gateway.lifecycle import Setback, setback_of_status


class Leg:
    """One request to an engine whose whole answer is gathered.

    Args:
        flow: the request it belongs to; woken when the answer is there.
    """

    __slots__ = ("_size", "call", "content_type", "done", "fault", "flow", "pieces", "retry_after", "status")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.call: Call | None = None
        self.status = 0
        self.content_type = b""
        self.retry_after = b""
        self.pieces: list[bytes] = []
        self.done = False
        self.fault: Fault | None = None
        self._size = 0

    async def finished(self) -> None:
        """Wait for the answer's end, or for a fault."""
        while not self.done:
            await park()

    @property
    def answer(self) -> bytes:
        """The body that came."""
        pieces = self.pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def setback(self) -> Setback | None:
        """What went wrong; None when it was served."""
        if self.fault is not None:
            return Setback.CONNECT if self.fault.kind is FaultKind.CONNECT else Setback.BROKEN
        return setback_of_status(self.status)

    def abort(self) -> None:
        """Give up; the engine notices."""
        self.done = True
        if self.call is not None:
            self.call.abort()

    # -- Receiver

    def head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self.status = status
        self.content_type = content_type
        self.retry_after = retry_after

    def body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self.abort()
            self.failed(Fault(FaultKind.BROKEN, f"an answer of more than {MAX_ANSWER_BYTES} bytes"))
            return
        self.pieces.append(data)

    def end(self) -> None:
        self.done = True
        self.flow.wake()

    def failed(self, fault: Fault) -> None:
        self.done = True
        self.fault = fault
        self.flow.wake()


class StreamLeg(Leg):
    """A leg whose events flow to the client as they come.

    Until the first token nothing is sent, so that another engine can still be tried: an answer that is no
    stream, or a stream that begins with an error, is gathered instead.

    Args:
        flow: the request it belongs to.
        exchange: the client's.
        headers: extra header lines of the answer.
        cached_tokens: what the usage has to say; None = as it is.
        stall_s: wall seconds without a piece after which the flow is interrupted.
    """

    __slots__ = (
        "_exchange",
        "_headers",
        "_stall_s",
        "begun",
        "error_status",
        "first_s",
        "gaps_s",
        "last_s",
        "stream",
    )

    def __init__(
        self, flow: Flow, exchange: Exchange, headers: bytes, cached_tokens: int | None, stall_s: float
    ) -> None:
        super().__init__(flow)
        self._exchange = exchange
        self._headers = headers
        self._stall_s = stall_s
        self.stream = EventStream(cached_tokens)
        self.begun = False
        self.error_status = 0
        self.first_s = 0.0
        """When the first piece came, monotonic seconds."""
        self.last_s = 0.0
        self.gaps_s: list[float] = []
        """Wall seconds between pieces."""

    @property
    def setback(self) -> Setback | None:
        if self.fault is None and self.error_status:
            return setback_of_status(self.error_status)
        return super().setback

    async def first(self) -> None:
        """Wait for the first token, or for the end without one."""
        while not self.done and not self.begun:
            await park()

    def body(self, data: bytes) -> None:
        if self.begun:
            now_s = time.monotonic()
            self.gaps_s.append(now_s - self.last_s)
            self.last_s = now_s
            exchange = self._exchange
            if not exchange.paused:
                self.flow.deadline_s = now_s + self._stall_s
            data = self.stream.feed(data)
            if data:
                exchange.write(data)
        elif (
            self.status == 200
            and self.content_type.startswith(b"text/event-stream")
            and not self.error_status
        ):
            self._begin(data)
        elif not self.error_status:
            super().body(data)

    def _begin(self, data: bytes) -> None:
        data = self.stream.feed(data)
        if not data:
            return
        error = error_of(data)
        if error is not None:
            self.error_status, event = error
            self.pieces = [event]
            return
        self.begun = True
        self.first_s = self.last_s = time.monotonic()
        exchange = self._exchange
        if exchange.ended:
            # Its client was told that it took too long; this only tells that the staged KV was taken.
            self.flow.wake()
            return
        exchange.stream = self
        if exchange.paused:
            # By an answer before this one, which its client has not read yet.
            self.pause()
        exchange.begin(200, EVENT_STREAM, self._headers)
        exchange.write(data)
        self.flow.wake()

    # -- Stream, for the exchange

    def pause(self) -> None:
        if self.call is not None:
            self.call.pause()
        self.flow.deadline_s = time.monotonic() + self._stall_s

    def resume(self) -> None:
        if self.call is not None:
            self.call.resume()
        self.flow.deadline_s = time.monotonic() + self._stall_s
