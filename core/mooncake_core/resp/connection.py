"""One RESP connection: requests in, replies out in the same order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import hiredis

from mooncake_core.resp.errors import DeadlineError, DemotedError, ReplyError, reply_error
from mooncake_core.resp.pending import Pending

Argument: TypeAlias = bytes | str | int | float | memoryview
Reply: TypeAlias = Any
"""bytes, int, None, or a list of these."""

_NOT_YET = object()
_MAX_PENDING = 1 << 16
_MAX_UNSENT_BYTES = 32 << 20
POSTED_WITHIN_S = 0.005
"""Wall seconds that a posted command may wait for another one with which it can leave."""


# hiredis' stub declares a tuple of exactly one.
_pack = cast("Callable[[Sequence[Argument]], bytes]", hiredis.pack_command)


class Connection(asyncio.Protocol):
    """The protocol of one connection; it lives once, from connect to loss.

    Deadlines cost no timer a call: one timer stands at the earliest deadline known and looks again when it
    fires, which under load is once per budget, not once per call.

    What is posted leaves with the next command, so that neither its sending nor its reply costs a wake-up of
    the process; where none comes it leaves by itself after `POSTED_WITHIN_S`. The order of commands is kept.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        stall_s: float,
        on_error: Callable[[ReplyError], None],
    ) -> None:
        self._loop = loop
        self._stall_s = stall_s
        self._on_error = on_error
        self._reader = hiredis.Reader(replyError=reply_error, notEnoughData=_NOT_YET)
        self._waiters: deque[Pending] = deque()
        self._transport: asyncio.Transport | None = None
        self._posted: list[bytes] = []
        self._posting: asyncio.Handle | None = None
        self._full = False
        self._timer: asyncio.Handle | None = None
        self._timer_at_s = 0.0
        self._reason: Exception | None = None
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection has ended."""

    @property
    def is_open(self) -> bool:
        """Whether a command would be sent now."""
        return self._transport is not None and not self._transport.is_closing()

    def request(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> Pending:
        """Send commands in one write; awaited it gives the list of replies, or the first error of them."""
        pending = Pending(self._loop, self._loop.time() + timeout_s, many=len(commands))
        self._expect(pending)
        self._write(b"".join([_pack(tuple(command)) for command in commands]))
        return pending

    def request_one(self, command: tuple[Argument, ...], timeout_s: float) -> Pending:
        """Send one command; what is awaited gives its reply."""
        loop = self._loop
        pending = Pending(loop, loop.time() + timeout_s)
        self._expect(pending)
        self._write(_pack(command))
        return pending

    def post(self, command: tuple[Argument, ...], timeout_s: float) -> None:
        """Send one command soon whose reply interests nobody; an error is told to `on_error`."""
        # Its time begins when it leaves at the latest.
        self._expect(Pending(self._loop, self._loop.time() + POSTED_WITHIN_S + timeout_s, posted=True))
        self._posted.append(_pack(command))
        if self._posting is None:
            self._posting = self._loop.call_later(POSTED_WITHIN_S, self._send_posted)

    def abort(self, reason: Exception | None = None) -> None:
        """Drop the connection now; whoever waits gets ConnectionError."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def _expect(self, waiter: Pending) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionError("the connection to Redis is lost")
        if self._full or len(self._waiters) >= _MAX_PENDING:
            raise ConnectionError("Redis does not keep up: too much is waiting for it")
        self._waiters.append(waiter)
        if self._timer is None or waiter.deadline_s < self._timer_at_s:
            self._arm(waiter.deadline_s)

    def _write(self, payload: bytes) -> None:
        if self._posted:
            payload = b"".join([*self._posted, payload])
            self._posted.clear()
        # uvloop gathers what is written in one turn of the loop into one system call.
        cast("asyncio.Transport", self._transport).write(payload)

    def _send_posted(self) -> None:
        self._posting = None
        if self._posted:
            self._write(b"")

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # uvloop gives back no TimerHandle for a time that is (nearly) past, so the time is kept here.
        self._timer_at_s = when_s
        self._timer = self._loop.call_at(when_s, self._overdue)

    def _overdue(self) -> None:
        # A late loop is no late Redis: replies that lie in the socket are read before any call is failed.
        # uvloop runs timers and `call_soon` before it reads sockets, so the second hop is behind a reading.
        if self._waiters:
            self._timer = self._loop.call_soon(self._look_again)
        else:
            self._timer = None

    def _look_again(self) -> None:
        self._timer = self._loop.call_soon(self._expire)

    def _expire(self) -> None:
        self._timer = None
        if not self._waiters:
            return
        now_s = self._loop.time()
        if self._waiters[0].deadline_s + self._stall_s < now_s:
            self.abort(ConnectionError(f"Redis has not answered for more than {self._stall_s} s"))
            return
        earliest_s = self._waiters[0].deadline_s + self._stall_s + 0.001
        late = []
        for waiter in self._waiters:
            if waiter.deadline_s > now_s:
                earliest_s = min(earliest_s, waiter.deadline_s)
            elif not waiter.posted and not waiter.is_done:
                late.append(waiter)
        self._arm(earliest_s)
        for waiter in late:
            waiter.fulfil(None, DeadlineError("Redis did not answer within the time of the call"))

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        waiters = self._waiters
        answered: list[tuple[Pending, Reply]] = []
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _NOT_YET:
                waiter = waiters[0]
                replies = waiter.replies
                if replies is not None:
                    replies.append(reply)
                    if len(replies) < waiter.many:
                        continue
                    reply = next((each for each in replies if isinstance(each, ReplyError)), replies)
                waiters.popleft()
                answered.append((waiter, reply))
        except (hiredis.ProtocolError, IndexError) as error:
            self.abort(ConnectionError(f"what answers is no Redis, or spoke out of turn: {error}"))
        demoted = next((reply for _, reply in answered if isinstance(reply, DemotedError)), None)
        if demoted is not None:
            # Behind one name stands another primary now, and this connection would never lead there.
            self.abort(demoted)
        # Who is told goes on at once, and may ask the next thing here.
        for waiter, reply in answered:
            if not isinstance(reply, ReplyError):
                waiter.fulfil(reply)
            elif waiter.posted:
                self._on_error(reply)
            else:
                waiter.fulfil(None, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._posted.clear()
        for handle in (self._timer, self._posting):
            if handle is not None:
                handle.cancel()
        self._timer = self._posting = None
        reason = self._reason or exc
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.fulfil(
                None, ConnectionError(f"the connection to Redis broke: {reason or 'closed by Redis'}")
            )
        if not self.lost.done():
            self.lost.set_result(None)
