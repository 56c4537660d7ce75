"""An engine that does what a test tells it, over real sockets: vLLM's HTTP and its bad manners.

Each request takes the next `Act` of its script, or behaves well. Bodies, headers and aborts are recorded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

from mooncake_core.registry import EngineKind, Instance, Role


@dataclass
class Act:
    """What happens to one request.

    Args:
        status: anything but 200 is answered at once with `body`.
        body: of that answer.
        headers: more headers of the answer.
        wait_s: before anything is answered.
        stall: never answer.
        stall_after: chunks after which nothing more comes; None = goes on.
        die_after: chunks after which the connection is broken off (0 = before the head).
        end_after: chunks after which the stream ends without its end mark.
        tokens: how many tokens are answered, one a chunk.
        gap_s: between them.
        first_event: sent instead of the first token's.
        last_event: sent before the end mark.
        hold: awaited before the answer.
        finish_reason: of the last token.
        pad: more characters in each streamed token.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    stall: bool = False
    stall_after: int | None = None
    die_after: int | None = None
    end_after: int | None = None
    tokens: int | None = None
    gap_s: float = 0.0
    first_event: bytes | None = None
    last_event: bytes | None = None
    hold: asyncio.Event | None = None
    finish_reason: str = "length"
    pad: int = 0


@dataclass
class Seen:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    act: Act | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """The connection was closed before the answer's end."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        """The body as JSON."""
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def kv(self) -> dict[str, Any]:
        """Its kv_transfer_params."""
        found: dict[str, Any] = self.body["kv_transfer_params"]
        return found


class ScriptedEngine:
    """One engine on a loopback port.

    Args:
        name: its instance id.
        role: what it registers as.
        connector: as in `Instance`.
        cached_tokens: what its usage says.
    """

    def __init__(
        self, name: str, role: Role = Role.BOTH, connector: str = "", cached_tokens: int = 0
    ) -> None:
        self.name = name
        self.role = role
        self.connector = connector
        self.cached_tokens = cached_tokens
        self.engine_id = f"engine-{name}-1"
        self.ranks = 1
        self.healthy = True
        self.silent: set[str] = set()
        """Paths that are never answered."""
        self.script: list[Act] = []
        self.usual = Act()
        self.seen: list[Seen] = []
        self.bootstrap_queries = 0
        self.tokenize: Callable[[dict[str, Any]], list[int]] | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.arrived = asyncio.Condition()

    # -- life

    async def start(self) -> None:
        """Listen; on the same port again after `kill`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Break everything off, as kill -9 does."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Aborted transports end in a later turn of the loop.
        await asyncio.sleep(0.01)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    def instance(self, **more: Any) -> Instance:
        """How it announces itself."""
        known: dict[str, Any] = {
            "id": self.name, "role": self.role, "url": self.url, "model": "tiny", "pool": str(self.role),
            "revision": "1", "engine": EngineKind.VLLM, "engine_version": "0.32.0",
            "connector": self.connector, "block_size_tokens": 16, "max_model_len_tokens": 4096,
            "bootstrap_url": self.url if self.connector == "MooncakeConnector" else "",
        }  # fmt: skip
        return Instance(**(known | more))

    # -- what tests look at

    @property
    def legs(self) -> list[Seen]:
        """The completions and chats that came."""
        return [seen for seen in self.seen if seen.path.startswith("/v1/")]

    async def leg(self, number: int = 1, timeout_s: float = 5.0) -> Seen:
        """The `number`-th completion or chat, once it has come."""
        async with asyncio.timeout(timeout_s), self.arrived:
            await self.arrived.wait_for(lambda: len(self.legs) >= number)
        return self.legs[number - 1]

    # -- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            early = bytearray()
            while await self._exchange(reader, writer, early):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, early: bytearray
    ) -> bool:
        """Serve one request; `early` is what was read of it while the one before was answered."""
        parsed = _Parsed()
        parser = httptools.HttpRequestParser(parsed)
        if early:
            parser.feed_data(bytes(early))
            early.clear()
        while not parsed.complete:
            data = await reader.read(1 << 16)
            if not data:
                return False
            parser.feed_data(data)
        seen = Seen(parser.get_method().decode(), parsed.path, parsed.headers, parsed.body)
        answering = asyncio.ensure_future(self._answer(seen, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or isinstance(answering.exception(), ConnectionError):
                seen.aborted.set()
                return False
            seen.finished.set()
            return answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
            _, read = await asyncio.gather(answering, leaving, return_exceptions=True)
            if isinstance(read, bytes):
                early += read

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        async with self.arrived:
            self.seen.append(seen)
            self.arrived.notify_all()
        if seen.path in self.silent:
            await asyncio.Event().wait()
        if seen.path == "/health":
            _write(writer, 200 if self.healthy else 500, b"")
        elif seen.path == "/query":
            self.bootstrap_queries += 1
            ranks = {str(n): {"engine_id": self.engine_id + f"-{n}" * (n > 0)} for n in range(self.ranks)}
            _write(writer, 200, json.dumps(ranks).encode())
        elif seen.path == "/tokenize":
            if self.tokenize is None:
                _write(writer, 404, b"{}")
            else:
                ids = self.tokenize(seen.body)
                _write(writer, 200, json.dumps({"count": len(ids), "tokens": ids}).encode())
        else:
            seen.act = self.script.pop(0) if self.script else self.usual
            return await self._act(seen, seen.act, writer)
        return True

    async def _act(self, seen: Seen, act: Act, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(act.wait_s)
        if act.hold is not None:
            await act.hold.wait()
        if act.stall:
            await asyncio.Event().wait()
        if act.die_after == 0:
            return False
        if act.status != 200:
            _write(writer, act.status, act.body, act.headers)
            return True
        if seen.body.get("stream"):
            return await self._stream(seen, act, writer)
        _write(writer, 200, json.dumps(self._whole(seen, act)).encode(), act.headers)
        await writer.drain()
        return True

    def _tokens(self, seen: Seen, act: Act) -> int:
        return int(act.tokens or seen.body.get("max_tokens") or 4)

    def usage(self, seen: Seen, act: Act) -> dict[str, Any]:
        """The usage it answers."""
        prompt = seen.body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else 10
        return {
            "prompt_tokens": count, "total_tokens": count + self._tokens(seen, act),
            "completion_tokens": self._tokens(seen, act),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }  # fmt: skip

    def _whole(self, seen: Seen, act: Act) -> dict[str, Any]:
        text = "".join(f" t{n}" for n in range(self._tokens(seen, act)))
        choice: dict[str, Any] = {"index": 0, "finish_reason": act.finish_reason, "logprobs": None}
        chat = seen.path.endswith("/chat/completions")
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        answer = {
            "id": "cmpl-" + seen.headers.get("x-request-id", ""), "created": 1, "model": "tiny",
            "object": "chat.completion" if chat else "text_completion", "choices": [choice],
            "usage": self.usage(seen, act), "kv_transfer_params": None,
        }  # fmt: skip
        if (
            seen.body.get("kv_transfer_params", {}).get("do_remote_decode")
            and self.connector == "NixlConnector"
        ):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
                "remote_engine_id": self.engine_id, "remote_request_id": answer["id"],
                "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
            }  # fmt: skip
        return answer

    async def _stream(self, seen: Seen, act: Act, writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chat = seen.path.endswith("/chat/completions")
        count = self._tokens(seen, act)
        for number in range(count):
            if act.die_after == number:
                return False
            if act.end_after == number:
                break
            if act.stall_after == number:
                await asyncio.Event().wait()
            if number == 0 and act.first_event is not None:
                _chunk(writer, act.first_event)
                continue
            last = number == count - 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": act.finish_reason if last else None}
            if chat:
                choice["delta"] = {"content": f" t{number}" + "." * act.pad}
            else:
                choice["text"] = f" t{number}" + "." * act.pad
            _event(writer, self._chunk_of(seen, [choice]))
            await writer.drain()
            if act.gap_s:
                await asyncio.sleep(act.gap_s)
        if act.end_after is None:
            if (seen.body.get("stream_options") or {}).get("include_usage"):
                _event(writer, self._chunk_of(seen, []) | {"usage": self.usage(seen, act)})
            if act.last_event is not None:
                _chunk(writer, act.last_event)
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _chunk_of(self, seen: Seen, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = seen.path.endswith("/chat/completions")
        return {
            "id": "cmpl-" + seen.headers.get("x-request-id", ""), "created": 1, "model": "tiny",
            "object": "chat.completion.chunk" if chat else "text_completion", "choices": choices,
        }  # fmt: skip


class _Parsed:
    def __init__(self) -> None:
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def _write(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    )
    writer.write(head.encode() + body)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


@asynccontextmanager
async def engines(*wanted: ScriptedEngine) -> AsyncIterator[tuple[ScriptedEngine, ...]]:
    """Run engines."""
    for engine in wanted:
        await engine.start()
    try:
        yield wanted
    finally:
        for engine in wanted:
            await engine.kill()
