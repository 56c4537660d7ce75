"""The kept connections to each engine."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from mooncake_scheduler.gateway.http1.client import Call, Receiver, UpstreamConnection

KEEP_IDLE_S = 4.0
"""uvicorn, which serves most engines, closes idle connections after 5 s: ours are given up before that."""
KEEP_IDLE = 256


class Upstream:
    """The connections to one engine.

    Args:
        url: base URL, `http://host:port` with an optional path.

    Raises:
        ValueError: the URL is not HTTP or has no host.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of an engine: write http://host:port")
        self.url = url
        self.host = parts.hostname
        self.tls = parts.scheme == "https" or None
        self.port = parts.port or (443 if self.tls else 80)
        self._base = parts.path.rstrip("/").encode()
        self._host_line = f"host: {parts.netloc.rpartition('@')[2]}\r\n".encode()
        self._prefixes: dict[tuple[bytes, bytes], bytes] = {}
        self._idle: list[UpstreamConnection] = []
        self.open: set[UpstreamConnection] = set()
        self.generation = 0
        """Grows when a connection opens while none was: another process may answer there now."""
        self._retired = False

    def request(self, method: bytes, path: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        """Send a request; `headers` are complete lines, those of the body's framing are added."""
        prefix = self._prefixes.get((method, path))
        if prefix is None:
            prefix = b"%b %b%b HTTP/1.1\r\n%b" % (method, self._base, path, self._host_line)
            if len(self._prefixes) < 32:
                self._prefixes[method, path] = prefix
        if body:
            message = b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
                prefix, headers, len(body), body,
            )  # fmt: skip
        else:
            message = b"%b%b\r\n" % (prefix, headers)
        call = Call(self, message, receiver)
        connection = self._take_idle()
        if connection is None:
            call.connect()
        else:
            call.send_on(connection)
        return call

    def _take_idle(self) -> UpstreamConnection | None:
        oldest_s = time.monotonic() - KEEP_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                if connection.idle_since_s >= oldest_s:
                    return connection
                connection.abort()
        return None

    def opened(self, connection: UpstreamConnection) -> None:
        """A connection was made."""
        if not self.open:
            self.generation += 1
        self.open.add(connection)

    def keep(self, connection: UpstreamConnection) -> None:
        """Take a connection back for the next request."""
        connection.idle_since_s = time.monotonic()
        if len(self._idle) < KEEP_IDLE and not self._retired:
            self._idle.append(connection)
        else:
            connection.abort()

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection has ended."""
        self.open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def retire(self) -> None:
        """Send no more: what is under way may end, then its connection is closed."""
        self._retired = True
        for connection in list(self._idle):
            connection.abort()

    def close(self) -> None:
        """Break off every connection."""
        for connection in list(self.open):
            connection.abort()
