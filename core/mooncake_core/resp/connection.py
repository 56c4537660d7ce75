"""One RESP connection: requests in, replies out in the same order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import hiredis

Argument: TypeAlias = bytes | str | int | float | memoryview
Reply: TypeAlias = Any
"""bytes, int, None, or a list of these."""

_UNAVAILABLE_CODES = frozenset(
    {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN"}
)
_NOT_YET = object()
_MAX_PENDING = 1 << 16
_MAX_UNSENT_BYTES = 32 << 20
POSTED_WITHIN_S = 0.005
"""Wall seconds that a posted command may wait for another one with which it can leave."""


# hiredis' stub declares a tuple of exactly one.
_pack = cast("Callable[[Sequence[Argument]], bytes]", hiredis.pack_command)


class ReplyError(Exception):
    """Redis answered with an error; the message is Redis' own and starts with its code (`WRONGTYPE …`)."""

    @property
    def code(self) -> str:
        """First word of the error."""
        return str(self).partition(" ")[0]


class UnavailableError(ReplyError, ConnectionError):
    """Redis is there but cannot serve now: loading, full, busy, or no longer the primary."""


class DeadlineError(ConnectionError):
    """The reply did not come within the call's time. Whether the command was carried out is not known."""


def _error(text: str) -> ReplyError:
    # Inside a script the code of the failed command stands behind the script's own "ERR".
    code = text.partition(" ")[0]
    if code in _UNAVAILABLE_CODES or "-OOM " in text or "-READONLY " in text:
        return UnavailableError(text)
    return ReplyError(text)


class _Waiter:
    """Who waits for the next reply, or for a list of the next `many`; without a future nobody does."""

    __slots__ = ("deadline_s", "future", "many", "replies")

    def __init__(self, future: asyncio.Future[Reply] | None, deadline_s: float, many: int = 0) -> None:
        self.future = future
        self.deadline_s = deadline_s
        self.many = many
        self.replies: list[Reply] | None = [] if many else None


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
        self._reader = hiredis.Reader(replyError=_error, notEnoughData=_NOT_YET)
        self._waiters: deque[_Waiter] = deque()
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

    def request(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> asyncio.Future[Reply]:
        """Send commands in one write; the future gets the list of replies, or the first error among them."""
        waiter = _Waiter(self._loop.create_future(), self._loop.time() + timeout_s, many=len(commands))
        self._expect(waiter)
        self._write(b"".join([_pack(tuple(command)) for command in commands]))
        return cast("asyncio.Future[Reply]", waiter.future)

    def request_one(self, command: tuple[Argument, ...], timeout_s: float) -> asyncio.Future[Reply]:
        """Send one command; the future gets its reply."""
        loop = self._loop
        future: asyncio.Future[Reply] = loop.create_future()
        self._expect(_Waiter(future, loop.time() + timeout_s))
        self._write(_pack(command))
        return future

    def post(self, command: tuple[Argument, ...], timeout_s: float) -> None:
        """Send one command soon whose reply interests nobody; an error is told to `on_error`."""
        # Its time begins when it leaves at the latest.
        self._expect(_Waiter(None, self._loop.time() + POSTED_WITHIN_S + timeout_s))
        self._posted.append(_pack(command))
        if self._posting is None:
            self._posting = self._loop.call_later(POSTED_WITHIN_S, self._send_posted)

    def abort(self, reason: Exception | None = None) -> None:
        """Drop the connection now; whoever waits gets ConnectionError."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def _expect(self, waiter: _Waiter) -> None:
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
        for waiter in self._waiters:
            future = waiter.future
            if waiter.deadline_s > now_s:
                earliest_s = min(earliest_s, waiter.deadline_s)
            elif future is not None and not future.done():
                future.set_exception(DeadlineError("Redis did not answer within the time of the call"))
        self._arm(earliest_s)

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
                self._answer(waiter.future, reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self.abort(ConnectionError(f"what answers is no Redis, or spoke out of turn: {error}"))

    def _answer(self, future: asyncio.Future[Reply] | None, reply: Reply) -> None:
        if future is None:
            if isinstance(reply, ReplyError):
                self._on_error(reply)
        elif not future.done():
            if isinstance(reply, ReplyError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

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
            if waiter.future is not None and not waiter.future.done():
                error = ConnectionError(f"the connection to Redis broke: {reason or 'closed by Redis'}")
                waiter.future.set_exception(error)
        if not self.lost.done():
            self.lost.set_result(None)
