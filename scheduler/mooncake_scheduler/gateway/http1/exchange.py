"""One request and its answer, as handlers see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mooncake_scheduler.gateway.http1 import heads

if TYPE_CHECKING:
    from mooncake_scheduler.gateway.http1.connection import ServerConnection


class Stream(Protocol):
    """Where the bytes of an answer come from; paused while the client reads too slowly."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Exchange:
    """One request and its answer.

    The handler answers with `respond`, or with `begin`, `write`… and `end`; it may set `on_left`, which is
    called when the client goes before the answer has ended. After that, writing does nothing.
    """

    __slots__ = (
        "body", "caller", "connection", "ended", "headers", "keep_alive", "left", "method", "on_left", "path",
        "paused", "query", "started", "status", "stream", "version",
    )  # fmt: skip

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.method = b""
        self.path = b""
        self.query = b""
        self.version = "1.1"
        self.headers: dict[bytes, bytes] = {}
        """By lower-case name; of a repeated header the first one counts."""
        self.body = b""
        self.caller: Any = None
        """For the handler: who it found to be asking."""
        self.keep_alive = True
        self.started = False
        """The answer's head is on its way: its status can no longer change."""
        self.ended = False
        """The answer is whole: nothing may be added."""
        self.status = 0
        self.left = False
        self.paused = False
        self.on_left: Callable[[], None] | None = None
        self.stream: Stream | None = None

    def respond(self, status: int, body: bytes, content_type: bytes = heads.JSON, extra: bytes = b"") -> None:
        """Send the whole answer. `extra` are complete header lines."""
        if self.left:
            return
        self.started = True
        self.status = status
        keep_alive = self.connection.stays(self)
        if keep_alive and self.version == "1.0":
            # Such clients take any other answer for the last one.
            extra += heads.KEEP_ALIVE
        head = heads.answer_head(status, content_type, len(body), extra=extra, keep_alive=keep_alive)
        self.ended = True
        self.connection.send(head if self.method == b"HEAD" else head + body)
        self.connection.answered(self)

    def begin(self, status: int, content_type: bytes, extra: bytes = b"") -> None:
        """Send the head of an answer whose length is not known."""
        if self.left:
            return
        self.started = True
        self.status = status
        if self.version == "1.0":
            # Such clients know no chunks: the end of the connection is the end of the body.
            self.keep_alive = False
        head = heads.answer_head(
            status, content_type, None, extra=extra, keep_alive=self.connection.stays(self)
        )
        if self.version == "1.0":
            head = head.replace(b"transfer-encoding: chunked\r\n", b"", 1)
        self.connection.send(head)

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if self.left or not data:
            return
        self.connection.send(data if self.version == "1.0" else b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """End the body begun."""
        if self.left:
            return
        self.ended = True
        if self.version != "1.0":
            self.connection.send(heads.LAST_CHUNK)
        self.connection.answered(self)
