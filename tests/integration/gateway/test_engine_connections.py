"""The engine side of the gateway: a connection is kept only where nothing is left over on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from mooncake_scheduler.gateway.http1 import Fault, FaultKind, Upstream
from mooncake_scheduler.gateway.http1.simple import fetch

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LATE = b"HTTP/1.1 408 Too Late\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Says one script a connection: for each request that comes, bytes (and then nothing more)."""

    def __init__(self, *connections: Sequence[bytes | None]) -> None:
        self.scripts = list(connections)
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts.pop(0) if self.scripts else []
        try:
            for answer in script:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
            await reader.read(1)
        except asyncio.IncompleteReadError:
            return


@asynccontextmanager
async def upstream(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[Upstream]:
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await serve(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    to = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield to
    finally:
        to.close()
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.02)


async def ask(to: Upstream) -> tuple[int, bytes]:
    return await fetch(to, b"GET", b"/", timeout_s=3)


@pytest.mark.parametrize(
    "first",
    [ANSWER + ANSWER, ANSWER + LATE, ANSWER + b"HT", ANSWER + b"\x00"],
    ids=["a second answer", "a late refusal", "the beginning of one", "rubbish"],
)  # fmt: skip
async def test_what_comes_behind_an_answer_is_not_taken_for_the_next_one(first: bytes) -> None:
    engine = Engine([first, b"HTTP/1.1 500 Never Asked\r\ncontent-length: 0\r\n\r\n"], [ANSWER, ANSWER])
    async with upstream(engine.serve) as to:
        assert [await ask(to) for _ in range(3)] == [(200, b"ok")] * 3
        assert engine.requests == 3
        assert len(to.open) == 1


async def test_what_comes_unasked_while_a_connection_idles_closes_it() -> None:
    spoken = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await spoken.wait()
        writer.write(LATE)
        await reader.read()

    async with upstream(serve) as to:
        assert await ask(to) == (200, b"ok")
        spoken.set()
        async with asyncio.timeout(3):
            while to.open:
                await asyncio.sleep(0.005)
        spoken.clear()
        assert await ask(to) == (200, b"ok")
        spoken.set()


async def test_one_connection_is_never_given_to_two_requests() -> None:
    engine = Engine([ANSWER + ANSWER, ANSWER], [ANSWER], [ANSWER])
    async with upstream(engine.serve) as to:
        await ask(to)
        assert await asyncio.gather(ask(to), ask(to)) == [(200, b"ok")] * 2


async def test_a_request_that_the_engine_said_to_go_on_with_is_not_sent_twice() -> None:
    engine = Engine([ANSWER, CONTINUE, None], [ANSWER])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if engine.requests == 0:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CONTINUE)
            await writer.drain()
            await asyncio.sleep(0.02)
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
        engine.requests += 1

    async with upstream(serve) as to:
        assert await ask(to) == (200, b"ok")
        with pytest.raises(ConnectionError):
            await ask(to)
        assert engine.requests == 1


async def test_an_engine_that_answers_before_it_has_read_all_gets_a_new_connection_for_the_next() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n" if connections == 1 else ANSWER)
        await writer.drain()
        writer.transport.pause_reading()
        await asyncio.sleep(0.5)

    async with upstream(serve) as to:
        # More than sockets and streams hold between the two: the engine has read none of it.
        assert (await fetch(to, b"POST", b"/", body=b"x" * (32 << 20), timeout_s=3))[0] == 413
        assert await ask(to) == (200, b"ok")
        assert connections == 2


async def test_a_trailer_of_one_answer_says_nothing_of_the_next() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nretry-after: 9\r\n\r\n"
    engine = Engine([chunked, ANSWER])
    heard: list[tuple[int, bytes, bytes]] = []

    class Hears:
        def __init__(self) -> None:
            self.ended = asyncio.Event()

        def head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
            heard.append((status, content_type, retry_after))

        def body(self, data: bytes) -> None: ...

        def end(self) -> None:
            self.ended.set()

        def failed(self, fault: Fault) -> None:
            raise AssertionError(fault)

    async with upstream(engine.serve) as to:
        for _ in range(2):
            hears = Hears()
            to.request(b"GET", b"/", b"", b"", hears)
            await asyncio.wait_for(hears.ended.wait(), 3)
    assert heard == [(200, b"", b""), (200, b"", b"")]


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "no-such-host.invalid"])
async def test_a_host_that_is_none_is_an_engine_that_was_not_reached(host: str) -> None:
    faults: list[Fault] = []

    class Hears:
        def head(self, status: int, content_type: bytes, retry_after: bytes) -> None: ...

        def body(self, data: bytes) -> None: ...

        def end(self) -> None: ...

        def failed(self, fault: Fault) -> None:
            faults.append(fault)

    Upstream(f"http://{host}:1").request(b"GET", b"/", b"", b"", Hears())
    async with asyncio.timeout(6):
        while not faults:
            await asyncio.sleep(0.005)
    assert faults[0].kind is FaultKind.CONNECT


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"HTTP/1.1 200 ", b"z" * 1024),
        (b"HTTP/1.1 200 OK\r\n", b"y: " + b"z" * 1019 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\ny: ", b"z" * 1024),
        (b"", CONTINUE * 40),
        (CHUNKED + b"1;", b"z" * 1024),
        (CHUNKED + b"2\r\nok\r\n0\r\ny: ", b"z" * 1024),
    ],
    ids=["a reason", "headers", "a header", "interim answers", "a chunk's extension", "a trailer"],
)  # fmt: skip
async def test_what_has_no_end_and_is_no_body_is_not_gathered(begins: bytes, goes_on: bytes) -> None:
    taken = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begins)
        while taken < 64 << 20:
            writer.write(goes_on)
            await writer.drain()
            taken += len(goes_on)

    async with upstream(serve) as to:
        with pytest.raises(ConnectionError, match="headers too large"):
            await ask(to)
        # Sockets and streams hold some of it between the two.
        assert taken < 32 << 20
