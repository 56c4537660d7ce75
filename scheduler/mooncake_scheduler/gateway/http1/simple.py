"""One request and its whole answer, for what is not on the data path: probes, bootstrap, tokenising."""

from __future__ import annotations

import asyncio

from mooncake_scheduler.gateway.http1.client import Fault, FaultKind
from mooncake_scheduler.gateway.http1.upstream import Upstream

MAX_ANSWER_BYTES = 256 << 20


class _Collector:
    """A receiver that fulfils a future."""

    def __init__(self, answered: asyncio.Future[tuple[int, bytes]]) -> None:
        self._answered = answered
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_ANSWER_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
            self.failed(Fault(FaultKind.BROKEN, f"an answer of more than {MAX_ANSWER_BYTES} bytes"))

    def end(self) -> None:
        if not self._answered.done():
            self._answered.set_result((self._status, b"".join(self._pieces)))

    def failed(self, fault: Fault) -> None:
        if not self._answered.done():
            self._answered.set_exception(ConnectionError(fault.detail))


async def fetch(
    upstream: Upstream, method: bytes, path: bytes, *, body: bytes = b"", timeout_s: float
) -> tuple[int, bytes]:
    """Send a request; returns status and body.

    Raises:
        ConnectionError: no whole answer came in time.
    """
    answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
    call = upstream.request(method, path, b"", body, _Collector(answered))
    try:
        async with asyncio.timeout(timeout_s):
            return await answered
    except TimeoutError:
        raise ConnectionError(f"{upstream.url}: no answer within {timeout_s:g} s") from None
    finally:
        # Also of one that failed: it may go on sending.
        call.abort()
