"""However bytes are cut, and whenever they are answered: each request gets its own answer, in order, once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from mooncake_scheduler.gateway.answers import EventStream
from mooncake_scheduler.gateway.errors import plain_error_body
from mooncake_scheduler.gateway.http1 import Exchange, HttpServer, ServerLimits
from mooncake_scheduler.gateway.http1.connection import ServerConnection


class Wire:
    """The transport of a client that reads at once."""

    def __init__(self) -> None:
        self.sent = b""
        self.reading = True
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    abort = close


class Echo:
    """Refuses some, answers the others with what they sent: at once, or when it is told to."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.met: list[Exchange] = []
        self.waiting: list[Exchange] = []

    def head(self, exchange: Exchange) -> bool:
        self.met.append(exchange)
        if exchange.path == b"/refused":
            exchange.respond(401, b"")
            return True
        return False

    def request(self, exchange: Exchange) -> None:
        assert exchange in self.met
        self.waiting.append(exchange)
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        for exchange in [self.waiting.pop()] if self.waiting else []:
            exchange.respond(200, exchange.query + b"=" + exchange.body)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bool]:
    """A request, and whether it is refused."""
    body = draw(st.binary(max_size=30))
    refused = draw(st.booleans())
    path = b"/refused" if refused else b"/served?%d" % draw(st.integers(0, 99))
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n" % draw(st.sampled_from([path, b"http://x" + path]))
    head += draw(st.sampled_from([b"", b"x-empty:\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n"]))
    if draw(st.booleans()):
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body), refused
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    trailer = draw(st.sampled_from([b"", b"authorization: x\r\n", b"host: y\r\nx: z\r\n"]))
    return b"%btransfer-encoding: chunked\r\n\r\n%b0\r\n%b\r\n" % (head, chunks, trailer), refused


def cut(data: bytes, places: Sequence[float]) -> list[bytes]:
    ends = sorted({int(place * len(data)) for place in places} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


async def answers(pieces: Sequence[bytes], handler: Echo) -> tuple[list[bytes], Wire]:
    connection = ServerConnection(HttpServer(handler, ServerLimits(), plain_error_body))
    wire = Wire()
    connection.connection_made(cast("Any", wire))
    for piece in pieces:
        while not wire.reading:
            handler.answer()
            await asyncio.sleep(0)
        connection.data_received(piece)
        if not handler.at_once and len(piece) % 2:
            handler.answer()
            await asyncio.sleep(0)
    for _ in range(40):
        handler.answer()
        await asyncio.sleep(0)
    return re.findall(rb"HTTP/1\.1 (\d+ )[^\r]*\r\n(?:.*?)\r\n\r\n", wire.sent, re.DOTALL), wire


places = st.lists(st.floats(0, 1), max_size=12)


@given(sent=st.lists(requests(), min_size=1, max_size=12), places=places, at_once=st.booleans())
def test_however_requests_are_cut_each_gets_its_own_answer(
    sent: list[tuple[bytes, bool]], places: list[float], at_once: bool
) -> None:
    data = b"".join(request for request, _ in sent)

    async def whole(pieces: Sequence[bytes]) -> bytes:
        handler = Echo(at_once=at_once)
        found, wire = await answers(pieces, handler)
        assert [int(status) for status in found] == [401 if refused else 200 for _, refused in sent]
        assert not wire.closed
        assert len(handler.met) == len(sent)
        return wire.sent

    assert asyncio.run(whole(cut(data, places))) == asyncio.run(whole([data]))


@given(
    before=st.lists(requests(), max_size=3), rubbish=st.binary(min_size=1, max_size=200), places=places,
    at_once=st.booleans(),
)  # fmt: skip
def test_whatever_follows_no_request_before_it_loses_its_answer(
    before: list[tuple[bytes, bool]], rubbish: bytes, places: list[float], at_once: bool
) -> None:
    data = b"".join(request for request, _ in before) + rubbish
    found, _ = asyncio.run(answers(cut(data, places), Echo(at_once=at_once)))
    expected = [401 if refused else 200 for _, refused in before]
    assert [int(status) for status in found][: len(before)] == expected
    assert len(found) <= len(before) + 1 + rubbish.count(b"\n\r\n")


EVENTS = (
    b'data: {"choices":[{"text":"\xc3\xa9\\n\\n"}]}\n\n'
    b'data: {"usage":{"prompt_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


@given(places=places)
def test_a_stream_that_is_cut_anywhere_says_the_same(places: list[float]) -> None:
    stream = EventStream(2)
    pieces = [stream.feed(piece) for piece in cut(EVENTS, places) if piece]
    assert all(piece.endswith(b"\n\n") for piece in pieces if piece)
    whole = EventStream(2)
    assert b"".join(pieces) == whole.feed(EVENTS)
    assert b'"cached_tokens":2' in b"".join(pieces)
    assert stream.ended
    assert stream.last_error() is None
    assert stream.last_usage() is not None
