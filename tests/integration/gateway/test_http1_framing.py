"""What RFC 9110 and 9112 ask of a server, of clients that are odd, wrong or hostile."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mooncake_scheduler.gateway.http1 import Exchange
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.waiting import until

BODY = b'{"model":"tiny","prompt":[1,2,3],"max_tokens":2}'
KEY = "authorization: Bearer k"
NO_HOST = b"GET /health HTTP/1.1\r\n\r\n"


def request(method: str, path: str, *headers: str, body: bytes = b"", version: str = "1.1") -> bytes:
    length = [f"content-length: {len(body)}"] if body else []
    lines = "".join(f"{line}\r\n" for line in ("host: x", *length, *headers))
    return f"{method} {path} HTTP/{version}\r\n{lines}\r\n".encode() + body


def post(*headers: str, version: str = "1.1") -> bytes:
    return request("POST", "/v1/completions", *headers, body=BODY, version=version)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Gateway, ScriptedEngine]]:
    """A gateway that wants a key."""
    keys = folder / "keys.json"
    keys.write_text('{"me":"k"}')
    engine = ScriptedEngine("e")
    async with (
        engines(engine),
        gateway(folder, [engine.instance()], auth={"api_keys_file": str(keys)}) as running,
    ):
        yield running, engine


async def said(running: Gateway, *parts: bytes, until_closed: bool = False) -> list[int]:
    """Statuses of the answers to what is sent in these parts; 0 = then the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    got = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        closed = False
        while not closed:
            async with asyncio.timeout(3 if until_closed else 0.3):
                data = await reader.read(1 << 16)
            got, closed = got + data, not data
        return [*_statuses(got), 0]
    except TimeoutError:
        return _statuses(got)
    finally:
        writer.transport.abort()


def _statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]


@pytest.mark.parametrize(
    ("ahead", "status"),
    [
        (request("GET", "/v1/models", "transfer-encoding: chunked"), 401),
        (request("POST", "/nowhere", "transfer-encoding: chunked"), 404),
        (request("POST", "/v1/completions", "transfer-encoding: chunked"), 401),
        (request("GET", "/v1/models", KEY, "transfer-encoding: chunked"), 200),
    ],
)
async def test_a_request_whose_head_came_while_another_was_served_is_let_in_like_any_other(
    tmp_path: Path, ahead: bytes, status: int
) -> None:
    async with serving(tmp_path) as (running, engine):
        served = asyncio.Event()
        engine.script = [Act(hold=served)]
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(post(KEY) + ahead)
        await engine.leg()
        served.set()
        assert _statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
        writer.write(b"0\r\n\r\n")
        got = b""
        while str(status).encode() not in got:
            async with asyncio.timeout(3):
                got += await reader.read(1 << 16)
        writer.transport.abort()


async def test_one_that_expects_100_is_told_to_go_on_when_the_answer_before_it_has_ended(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (running, engine):
        served = asyncio.Event()
        engine.script = [Act(hold=served)]
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(post(KEY) + post(KEY, "expect: 100-continue")[: -len(BODY)])
        await engine.leg()
        served.set()
        async with asyncio.timeout(3):
            await reader.readuntil(b"100 Continue")
            writer.write(BODY)
            await reader.readuntil(b"200 OK")
        writer.transport.abort()


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([request("GET", "/v1/models", KEY, "upgrade: h2c", "connection: Upgrade")], [200]),
        ([post(KEY, "upgrade: h2c", "connection: Upgrade, HTTP2-Settings") + post(KEY)], [200, 200]),
        ([request("GET", "/health", "upgrade: websocket", "connection: upgrade") * 3], [200, 200, 200]),
        ([request("CONNECT", "a:443")], [501, 0]),
        ([request("POST", "/nowhere", "transfer-encoding: chunked"), b"zz\r\n"], [404, 0]),
        ([request("POST", "/v1/completions", "transfer-encoding: chunked"), b"-1\r\n"], [401, 0]),
        ([NO_HOST], [400, 0]),
        ([request("GET", "/health", "Host: y")], [400, 0]),
        ([request("GET", "/v1/models", KEY, "Authorization: Bearer other")], [400, 0]),
        ([b"GET /health HTTP/1.0\r\n\r\n"], [200, 0]),
        ([request("GET", "http://x/health")], [200]),
        ([post(KEY, "content-encoding: gzip") + post(KEY, "content-encoding: identity")], [415, 200]),
        ([request("GET", "HTTP://x")], [404]),
        ([request("GET", "/health", version="2.0")], [505, 0]),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], [400, 0]),
        ([post(KEY, "expect: 100-continue", version="1.0")], [200, 0]),
        ([post(KEY) * 20], [200] * 20),
        ([post(KEY) * 3 + b"\x00"], [200, 200, 200, 0]),
        ([request("GET", "/health", "x: a\r\n folded")], [400, 0]),
        ([request("GET", "/health", "x: a\x00b")], [400, 0]),
        ([request("GET", "/health", "transfer-encoding : chunked")], [400, 0]),
        ([request("POST", "/v1/completions", KEY, "transfer-encoding: xchunked")], [400, 0]),
        ([b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n"
          b"authorization: Bearer k\r\n\r\n30\r\n" + BODY + b"\r\n0\r\n\r\n"], [200, 0]),
    ],
)  # fmt: skip
async def test_each_request_gets_one_answer(tmp_path: Path, parts: list[bytes], statuses: list[int]) -> None:
    async with serving(tmp_path) as (running, _):
        assert await said(running, *parts, until_closed=statuses[-1] == 0) == statuses
        await running.settled()


async def test_trailers_are_no_headers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, engine):
        trailer = b"0\r\nauthorization: Bearer k\r\nx-request-id: smuggled\r\n\r\n"
        chunked = request("POST", "/v1/completions", "transfer-encoding: chunked")
        served = asyncio.Event()
        engine.script = [Act(hold=served)]
        asking = asyncio.ensure_future(
            said(running, post(KEY) + chunked + b"30\r\n" + BODY + b"\r\n" + trailer)
        )
        await engine.leg()
        served.set()
        assert await asking == [200, 401]


async def test_a_large_body_does_not_cost_its_client_the_refusal(tmp_path: Path) -> None:
    def upload(url: str) -> int:
        # It closes its connections, writes all of a body, and only then reads.
        asked = urllib.request.Request(
            url, data=b"x" * (8 << 20), headers={"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(asked, timeout=5)
        except urllib.error.HTTPError as answer:
            return answer.code
        return 200

    async with serving(tmp_path) as (running, _):
        assert await asyncio.to_thread(upload, f"{running.url}/v1/completions") == 401


@pytest.mark.parametrize("lasts", ["connection: close", "connection: keep-alive"])
async def test_a_large_answer_is_not_broken_off_while_its_client_reads_and_not_kept_for_one_that_does_not(
    tmp_path: Path, lasts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (running, _):
        monkeypatch.setattr(running.scheduler.datapath, "_metrics_text", lambda: b"x" * (32 << 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1)
        writer.transport.pause_reading()
        writer.write(request("GET", "/metrics", lasts))
        server = running.scheduler.server
        await until(lambda: any(each.idle and each.unread_bytes for each in server.connections))
        (connection,) = server.connections
        began_s = connection.since_s
        connection.check_time(began_s + server.limits.idle_s - 1)
        unread_bytes = connection.unread_bytes
        writer.transport.resume_reading()
        while connection.unread_bytes == unread_bytes:
            await reader.read(1 << 16)
        connection.check_time(began_s + server.limits.idle_s + 1)
        connection.check_time(began_s + 2 * server.limits.idle_s)
        await asyncio.sleep(0.02)
        assert connection in server.connections
        connection.check_time(began_s + 3 * server.limits.idle_s)
        connection.check_time(connection.since_s + server.limits.idle_s + 1)
        await until(lambda: connection not in server.connections)
        writer.transport.abort()


async def test_what_is_sent_ahead_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (running, _):
        loop, turn, asked_in, refused_in = asyncio.get_running_loop(), 0, [], []
        datapath = running.scheduler.datapath
        head = datapath.head

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            if len(refused_in) < 100:
                loop.call_soon(next_turn)

        def watched_head(exchange: Exchange) -> bool:
            answered = head(exchange)
            if answered:
                refused_in.append(turn)
            return answered

        monkeypatch.setattr(datapath, "_metrics_text", lambda: asked_in.append(turn) or b"none")
        monkeypatch.setattr(datapath, "head", watched_head)
        next_turn()
        ahead = request("GET", "/metrics") + request("GET", "/nowhere") + post()
        assert await said(running, ahead * 50, request("GET", "/health"), until_closed=False) == [
            *[200, 404, 401] * 50, 200,
        ]  # fmt: skip
        assert len(set(asked_in) | set(refused_in)) == 150, "more than one in a turn of the loop"


async def test_what_is_sent_ahead_waits_until_the_answers_before_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (running, _):
        text = b"x" * (256 << 10)
        asked: list[int] = []
        monkeypatch.setattr(running.scheduler.datapath, "_metrics_text", lambda: asked.append(1) or text)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1)
        writer.transport.pause_reading()
        writer.write(request("GET", "/metrics") * 99 + request("GET", "/metrics", "connection: close"))
        server = running.scheduler.server
        await until(lambda: any(each.unread_bytes for each in server.connections))
        (connection,) = server.connections
        answered = 0
        while len(asked) > answered:
            answered = len(asked)
            await asyncio.sleep(0.05)
        assert answered < 100
        assert connection.unread_bytes < 2 * len(text)
        writer.transport.resume_reading()
        got_bytes = 0
        while data := await reader.read(1 << 20):
            got_bytes += len(data)
        assert len(asked) == 100
        assert got_bytes > 100 * len(text)
        writer.transport.abort()


async def test_a_client_of_http_1_0_that_would_stay_is_told_that_it_may(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(2):
            writer.write(request("GET", "/health", "connection: keep-alive", version="1.0"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"\r\nconnection: keep-alive\r\n" in head
            assert await reader.readexactly(3) == b"ok\n"
        writer.transport.abort()


async def test_a_handler_that_fails_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (running, _):
        monkeypatch.setattr(running.scheduler.datapath, "_metrics_text", lambda: 1 / 0)
        assert await said(running, request("GET", "/metrics"), until_closed=True) == [500, 0]


ENDLESS = {
    "header": b"GET /health HTTP/1.1\r\nhost: x\r\nx: ",
    "name of a header": b"GET /health HTTP/1.1\r\nhost: x\r\n",
    "trailer": request("POST", "/v1/completions", KEY, "transfer-encoding: chunked") + b"0\r\nx: ",
    "extension of a chunk": request("POST", "/v1/completions", KEY, "transfer-encoding: chunked") + b"1;x=",
    "body of a refused one": request("POST", "/v1/completions", "transfer-encoding: chunked") + b"0\r\nx: ",
}


@pytest.mark.parametrize("begins", ENDLESS.values(), ids=ENDLESS)
async def test_what_never_ends_is_refused_before_it_is_kept(tmp_path: Path, begins: bytes) -> None:
    async with serving(tmp_path) as (running, _):
        server = running.scheduler.server
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(begins)
        await until(lambda: any(each._coming is not None for each in server.connections))
        (connection,) = server.connections
        sent_bytes = 0
        while not connection._deaf:
            writer.write(b"a" * 4096)
            await writer.drain()
            await asyncio.sleep(0)
            sent_bytes += 4096
            assert sent_bytes < 8 << 20
        writer.write_eof()
        expected = [401] if begins == ENDLESS["body of a refused one"] else [431]
        assert _statuses(await reader.read()) == expected
        assert connection._stuck_bytes < server.limits.header_bytes + (256 << 10), "one read beyond it"
        writer.transport.abort()


async def test_a_head_in_pieces_and_a_long_body_are_progress(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, engine):
        lines = [f"x-{number}: {'v' * 4000}" for number in range(7)]
        lines += [KEY, "transfer-encoding: chunked", "connection: close"]
        head = request("POST", "/v1/completions", *lines)
        head_parts = [head[at : at + 997] for at in range(0, len(head), 997)]
        spaces = [b"10000\r\n" + b" " * 65536 + b"\r\n"] * 3
        whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        assert await said(running, *head_parts, *spaces, whole, until_closed=True) == [200, 0]
        assert len(engine.legs[0].raw) == 3 * 65536 + len(BODY)
