from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.waiting import until

BODY = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}).encode()

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def post(body: bytes = BODY, *headers: str, version: str = "1.1") -> bytes:
    lines = "".join(f"{line}\r\n" for line in ("host: x", f"content-length: {len(body)}", *headers))
    return f"POST /v1/completions HTTP/{version}\r\n{lines}\r\n".encode() + body


@asynccontextmanager
async def serving(folder: Path, **settings: object) -> AsyncIterator[tuple[Gateway, ScriptedEngine]]:
    engine = ScriptedEngine("e")
    async with engines(engine), gateway(folder, [engine.instance()], **settings) as running:
        yield running, engine


class Wire:
    """A client that writes and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def to(cls, running: Gateway) -> AsyncIterator[Wire]:
        wire = cls(*await asyncio.open_connection("127.0.0.1", running.port))
        try:
            yield wire
        finally:
            wire.writer.transport.abort()
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            length = int(headers.get("content-length", 0))
            return int(head[0].split()[1]), headers, await self.reader.readexactly(length)


async def test_requests_sent_ahead_are_answered_one_by_one_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, engine), Wire.to(running) as wire:
        engine.script = [Act(wait_s=0.1)]
        wire.writer.write(b"".join(post(BODY, f"x-request-id: {n}") for n in range(4)))
        seen = [(await wire.answer())[1]["x-request-id"] for _ in range(4)]
        assert seen == ["0", "1", "2", "3"]


async def test_a_chunked_body_in_many_pieces_is_put_together(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, engine), Wire.to(running) as wire:
        head = CHUNKED
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
        for start in range(0, len(head + pieces), 7):
            wire.writer.write((head + pieces)[start : start + 7])
            await wire.writer.drain()
        assert (await wire.answer())[0] == 200
        assert engine.legs[0].raw == BODY


async def test_100_continue_is_said_before_the_body_is_expected(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, _), Wire.to(running) as wire:
        request = post(BODY, "expect: 100-continue")
        wire.writer.write(request[: -len(BODY)])
        assert (await wire.answer())[0] == 100
        wire.writer.write(BODY)
        assert (await wire.answer())[0] == 200


async def test_a_refused_request_that_expects_100_need_not_send_its_body(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"me":"k"}')
    async with serving(tmp_path, auth={"api_keys_file": str(keys)}) as (running, _), Wire.to(running) as wire:
        wire.writer.write(post(BODY, "expect: 100-continue")[: -len(BODY)])
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (401, "close")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (post(b"x" * 2000), 413),
        (CHUNKED + b"800\r\n" + b"x" * 2048, 413),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 404),
    ],
    ids=["length", "chunks", "headers", "target", "nonsense", "tls", "two lengths", "smuggling", "upgrade"],
)  # fmt: skip
async def test_what_is_too_large_or_not_http_is_refused_in_openais_shape(
    tmp_path: Path, sent: bytes, status: int
) -> None:
    async with serving(tmp_path, max_body_bytes=1024) as (running, _), Wire.to(running) as wire:
        wire.writer.write(sent)
        got, _, body = await wire.answer()
        assert got == status
        assert json.loads(body)["error"]["message"]


async def test_a_connection_is_closed_when_the_client_asks_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, _), Wire.to(running) as wire:
        wire.writer.write(post(BODY, "connection: close"))
        _, headers, _ = await wire.answer()
        assert headers["connection"] == "close"
        assert await wire.reader.read() == b""


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, _), Wire.to(running) as wire:
        body = json.dumps({"model": "tiny", "prompt": [1], "stream": True, "max_tokens": 2}).encode()
        wire.writer.write(post(body, version="1.0"))
        head, _, rest = (await wire.reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")


async def test_connections_that_idle_or_dawdle_are_closed(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, _), Wire.to(running) as idle, Wire.to(running) as slow:
        slow.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost")
        await until(lambda: len(running.scheduler.server.connections) == 2)
        await asyncio.sleep(0.05)
        later_s = asyncio.get_running_loop().time() + 80
        running.scheduler.server.check_time(later_s)
        assert await idle.reader.read() == b""
        assert (await slow.answer())[0] == 408


async def test_an_engines_answer_without_a_length_ends_with_its_connection(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"usage":null}')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    engine = ScriptedEngine("e")
    engine.port = server.sockets[0].getsockname()[1]
    async with gateway(tmp_path, [engine.instance()]) as running:
        assert (await running.complete()).json() == {"usage": None}
    server.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200), ("GET", "/ready", 200), ("GET", "/metrics", 200), ("GET", "/v1/models", 200),
        ("HEAD", "/health", 200), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405),
        ("GET", "/nowhere", 404), ("POST", "/v1/embeddings", 404),
    ],
)  # fmt: skip
async def test_the_paths_of_the_serving_port(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with serving(tmp_path) as (running, _):
        answer = await running.client.request(method, path)
        assert answer.status_code == status
        assert answer.headers.get("allow") == (
            {"/v1/models": "GET, HEAD"}.get(path, "POST") if status == 405 else None
        )


async def test_stopping_lets_streams_end_and_takes_nobody_new(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, engine), Wire.to(running) as wire:
        engine.usual = Act(tokens=10, gap_s=0.03)
        streaming = asyncio.ensure_future(running.stream())
        await engine.leg()
        stopping = asyncio.ensure_future(running.scheduler.stop(streams_s=5))
        assert (await streaming).endswith("data: [DONE]\n\n")
        await stopping
        assert await wire.reader.read() == b""
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", running.port)


async def test_while_its_end_is_announced_it_serves_whoever_still_comes_and_tells_them_to_go(
    tmp_path: Path,
) -> None:
    announced = {"announced_s": 3, "streams_s": 5}
    async with serving(tmp_path, stopping=announced) as (running, _), Wire.to(running) as kept:
        kept.writer.write(post())
        assert (await kept.answer())[1].get("connection") is None
        stopping = asyncio.ensure_future(running.scheduler.stop())
        await until(lambda: running.scheduler.draining)

        kept.writer.write(post())
        status, headers, _ = await kept.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await kept.reader.read() == b""
        async with Wire.to(running) as newcomer:
            newcomer.writer.write(post())
            status, headers, _ = await newcomer.answer()
            assert (status, headers["connection"]) == (200, "close")
        await stopping


async def test_the_next_request_of_a_client_whose_stream_just_ended_is_not_lost_to_the_end(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (running, engine):
        engine.script = [Act(tokens=10, gap_s=0.03), Act()]
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 10, "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.ensure_future(running.scheduler.stop(streams_s=5))
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        # Over the connection that it keeps: a new one would be refused by now.
        assert (await running.complete()).status_code == 200
        await stopping
