"""A bare engine for measuring routers: answers at once, speaks just enough of vLLM's HTTP and NIXL hand-over.

Run as `python fake_engine.py PORT [PORT …]`; one process serves all the ports. A streamed answer has
`max_tokens` chunks, one every CHUNK_GAP_S, so that a router reads them one by one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import httptools
import uvloop

CHUNK_GAP_S = 0.002
MODEL = "bench"
USAGE = {"prompt_tokens": 400, "completion_tokens": 1, "total_tokens": 401}
NIXL_ANSWER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_engine_id": "bench-engine", "remote_request_id": "cmpl-bench", "remote_host": "127.0.0.1",
    "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 400,
}  # fmt: skip


def _head(length: int, content_type: str = "application/json") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n".encode()


def _json(document: Any) -> bytes:
    body = json.dumps(document).encode()
    return _head(len(body)) + body


def _completion(**more: Any) -> bytes:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
    return _json(
        {"id": "cmpl-bench", "object": "text_completion", "created": 1, "model": MODEL,
         "choices": [choice], "usage": USAGE, **more}
    )  # fmt: skip


GET_ANSWERS = {
    b"/health": _head(0, "text/plain"),
    b"/v1/models": _json({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]}),
    b"/version": _json({"version": "0.32.0"}),
    b"/get_server_info": _json({"version": "0.32.0"}),
    b"/get_model_info": _json({"model_path": MODEL}),
    b"/server_info": _json({"version": "0.32.0"}),
    b"/model_info": _json({"model_path": MODEL}),
}
EMPTY = _head(0, "text/plain")
PLAIN = _completion()
PREFILLED = _completion(kv_transfer_params=NIXL_ANSWER)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


TOKEN = _chunk(
    b'data: {"id":"cmpl-bench","object":"text_completion","created":1,"model":"bench","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class FakeEngine(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, body = self._url, bytes(self._body)
        self._url, self._body = b"", bytearray()
        if not url.startswith(b"/v1/c"):
            self._transport.write(GET_ANSWERS.get(url.partition(b"?")[0], EMPTY))
            return
        if b'"stream":true' in body or b'"stream": true' in body:
            tokens = json.loads(body)["max_tokens"]
            self._transport.write(STREAM_HEAD)
            asyncio.get_running_loop().call_later(CHUNK_GAP_S, self._stream, tokens)
            return
        prefill = b'"do_remote_decode":true' in body or b'"do_remote_decode": true' in body
        self._transport.write(PREFILLED if prefill else PLAIN)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(LAST)
            return
        self._transport.write(TOKEN)
        asyncio.get_running_loop().call_later(CHUNK_GAP_S, self._stream, left - 1)


async def serve(ports: list[int]) -> None:
    """Listen on every port until killed."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(FakeEngine, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
