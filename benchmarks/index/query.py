"""`/query` of this index and of NVIDIA Dynamo's standalone indexer, fed with the same KV events."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import zmq

from mooncake_core.blocks import extend_keys
from mooncake_core.events import BlockStored, EventBatch, decode_batch, encode_batch
from mooncake_core.events.framing import Message, publication
from mooncake_core.index import RedisIndex, Source, Stored, Tier
from mooncake_core.registry import Instance, Role
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient
from mooncake_testing.ports import free_port

PEER = "ai-dynamo-runtime==1.6.1"
ENVIRONMENT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake" / "bench-dynamo"
NAMESPACE = "bench-query"
BLOCK_SIZE = 16
PROMPT_TOKENS = 131_072
SIZES = (64, 4096, PROMPT_TOKENS)
HELD_TOKENS = {1: PROMPT_TOKENS, 2: 100_000, 3: 4096, 4: 48}
CALLS, ROUNDS = 40, 3


class PeerMissingError(Exception):
    """Dynamo's indexer could not be installed or started here."""


def peer_python() -> Path:
    """The interpreter of Dynamo's own environment, made on first use: its pins are not ours."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / f".{PEER}"
    if not stamp.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", PEER], check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerMissingError(f"{PEER} cannot be installed in {ENVIRONMENT}: {error}") from None
        stamp.touch()
    return python


class RawClient:
    """HTTP/1.1 over one kept connection: the same for both, and next to nothing."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        status = self._file.readline()
        length = 0
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        answer = self._file.read(length)
        if status.split(b" ")[1] not in (b"200", b"201"):
            raise RuntimeError(f"{path}: {status!r} {answer!r}")
        return answer

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def events_of(tokens: list[int]) -> list[bytes]:
    """The events of an engine that computed these tokens, 128 blocks an event, as vLLM encodes them."""
    step = 128 * BLOCK_SIZE
    batches, parent, number = [], None, 1
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        hashes = tuple(range(number, number + len(part) // BLOCK_SIZE))
        number += len(hashes)
        stored = BlockStored(
            hashes=hashes, parent=parent, token_ids=array("I", part), block_size=BLOCK_SIZE, medium=Tier.HBM
        )
        batches.append(encode_batch(EventBatch(ts=time.time(), events=(stored,)), form="array"))
        parent = hashes[-1]
    return batches


async def feed_ours(url: str, streams: dict[int, list[bytes]]) -> None:
    """What the sidecars of these engines do: register, and bring the events to the index."""
    client = RespClient(url)
    await client.connect()
    index = RedisIndex(client, namespace=NAMESPACE, write_timeout_s=10)
    registry = RedisRegistry(url, namespace=NAMESPACE, ttl_s=3600)
    for instance, payloads in streams.items():
        registered = await registry.register(
            Instance(
                id=str(instance), role=Role.BOTH, url="http://127.0.0.1:9", cluster="bench", model="model",
                block_size_tokens=BLOCK_SIZE, kv_capacity_tokens=1 << 20, max_model_len_tokens=1 << 18,
            )
        )  # fmt: skip
        source = Source(registered.id, registered.epoch)
        await index.attach(source)
        last = None
        for sequence, payload in enumerate(payloads):
            for event in decode_batch(payload).events:
                keys = extend_keys(last, event.token_ids, event.block_size)
                await index.apply(source, [Stored(keys, event.medium)], sequence)
                last = keys[-1]
    await registry.close()
    await client.close()


def feed_dynamo(
    client: RawClient, publishers: dict[int, zmq.Socket], streams: dict[int, list[bytes]]
) -> None:
    for instance, publisher in publishers.items():
        endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        body = {
            "instance_id": instance,
            "endpoint": endpoint,
            "model_name": "model",
            "block_size": BLOCK_SIZE,
        }
        client.post("/register", json.dumps(body).encode())
    time.sleep(1)  # PUB drops what it sends before the subscription has arrived
    for instance, payloads in streams.items():
        for sequence, payload in enumerate(payloads):
            publishers[instance].send_multipart(publication(Message(b"", sequence, payload)))


def matched(answer: bytes) -> dict[int, int]:
    body: dict[str, Any] = json.loads(answer)
    instances = body["instances"] if "instances" in body else body["default"]
    return {int(name): entry["longest_matched"] for name, entry in instances.items()}


def wait_for(client: RawClient, body: bytes, expected: dict[int, int]) -> None:
    deadline = time.monotonic() + 30
    while (found := matched(client.post("/query", body))) != expected:
        if time.monotonic() > deadline:
            raise RuntimeError(f"/query finds {found}, the events say {expected}")
        time.sleep(0.05)


def query_ms(client: RawClient, body: bytes) -> float:
    medians = []
    for _ in range(ROUNDS):
        took = []
        for _ in range(CALLS):
            start = time.perf_counter()
            client.post("/query", body)
            took.append(time.perf_counter() - start)
        medians.append(median(took))
    return min(medians) * 1e3


def start_ours(stack: ExitStack, redis_url: str) -> RawClient:
    """A scheduler process, as it serves a cluster; `/query` is on its admin port."""
    serving, admin = free_port(), free_port()
    config = {
        "cluster": "bench", "model": "model", "namespace": NAMESPACE, "redis_url": redis_url,
        "serving": {"host": "127.0.0.1", "port": serving}, "admin": {"host": "127.0.0.1", "port": admin},
        "log_level": "error",
    }  # fmt: skip
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-index-"))
    path = Path(folder) / "scheduler.json"
    path.write_text(json.dumps(config))
    server = subprocess.Popen([sys.executable, "-m", "mooncake_scheduler", "--config", str(path)])
    stack.callback(_end, server)
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=1):
                return stack.enter_context(closing(RawClient(admin)))
        except OSError as error:  # refused, or 503 while it does not know its instances yet
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the scheduler does not become ready: {error}") from None
            time.sleep(0.1)


def start_dynamo(stack: ExitStack) -> RawClient:
    port = free_port()
    command = [str(peer_python()), "-m", "dynamo.indexer", "--port", str(port), "--threads", "2"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(_end, server)
    deadline = time.monotonic() + 20
    while True:
        try:
            return stack.enter_context(closing(RawClient(port)))
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise PeerMissingError(f"{PEER} does not start: {error}") from None
            time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(10)


async def compare(redis_url: str) -> tuple[dict[int, float], dict[int, float] | PeerMissingError]:
    """Milliseconds by prompt size: ours, and Dynamo's or why there is none."""
    chance = Random(7)
    tokens = [chance.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    streams = {instance: events_of(tokens[:held]) for instance, held in HELD_TOKENS.items()}
    expected = {instance: held // BLOCK_SIZE * BLOCK_SIZE for instance, held in HELD_TOKENS.items()}
    await feed_ours(redis_url, streams)
    with ExitStack() as stack:
        ours = start_ours(stack, redis_url)
        own_bodies = {n: _body("model", tokens[:n]) for n in SIZES}
        wait_for(ours, own_bodies[PROMPT_TOKENS], expected)
        own = {n: query_ms(ours, body) for n, body in own_bodies.items()}
        try:
            dynamo = start_dynamo(stack)
        except PeerMissingError as missing:
            return own, missing
        context = stack.enter_context(zmq.Context())
        publishers = {instance: stack.enter_context(context.socket(zmq.PUB)) for instance in streams}
        for publisher in publishers.values():
            publisher.set_hwm(0)
            publisher.bind("tcp://127.0.0.1:*")
        feed_dynamo(dynamo, publishers, streams)
        bodies = {n: _body("model_name", tokens[:n]) for n in SIZES}
        wait_for(dynamo, bodies[PROMPT_TOKENS], expected)
        return own, {n: query_ms(dynamo, body) for n, body in bodies.items()}


def _body(model_field: str, tokens: list[int]) -> bytes:
    return json.dumps({model_field: "model", "token_ids": tokens, "block_size": BLOCK_SIZE}).encode()
