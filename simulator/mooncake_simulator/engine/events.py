"""KV events on ZMQ: a PUB socket, and a ROUTER that replays what is still buffered.

Frames, numbering and buffer are those of vLLM's `ZmqEventPublisher`; the first batch of a process has
number 0.
"""

from __future__ import annotations

import array
import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mooncake_core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from mooncake_core.events.framing import (
    Message,
    parse_replay_request,
    publication,
    replay_answer,
    replay_end,
)
from mooncake_simulator.engine.faults import Faults
from mooncake_simulator.engine.hashing import external_hash
from mooncake_simulator.engine.options import EventsOptions
from mooncake_simulator.engine.pool import CacheEvent, Removed, Stored

LOG = logging.getLogger(__name__)


class EventPublisher:
    """Publishes one batch a step."""

    def __init__(self, options: EventsOptions, block_size: int, host_ip: str, faults: Faults) -> None:
        self._options = options
        self._block_size = block_size
        self._host_ip = host_ip
        self._faults = faults
        self._topic = options.topic.encode()
        self._next_sequence = 0
        self._buffer: deque[Message] = deque(maxlen=options.buffer_steps)
        self._context: zmq.asyncio.Context | None = None
        self._pub: zmq.asyncio.Socket | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._replay_task: asyncio.Task[None] | None = None
        self.endpoint = options.endpoint
        """Where it publishes, with the port the system chose."""

    @property
    def next_sequence(self) -> int:
        """The number of the next batch."""
        return self._next_sequence

    def start(self) -> None:
        """Open the sockets; nothing when events are off.

        Raises:
            OSError: an endpoint cannot be bound.
        """
        if not self._options.enabled:
            return
        try:
            self._open()
        except zmq.ZMQError as error:
            endpoints = f"{self._options.endpoint}, {self._options.replay_endpoint}"
            raise OSError(error.errno, f"KV events ({endpoints}): {error}") from error

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(self._options.hwm)
        if _binds(self._options.endpoint):
            self._pub.bind(self._options.endpoint)
            self.endpoint = self._resolved(self._pub)
        else:
            self._pub.connect(self._options.endpoint)
        if self._options.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.bind(self._options.replay_endpoint)
            self._replay_task = asyncio.get_running_loop().create_task(self._serve_replay(self._replay))

    async def stop(self) -> None:
        """Close the sockets, after what is queued has had a moment to leave."""
        if self._replay_task is not None:
            self._replay_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._replay_task
        for sock in (self._pub, self._replay):
            if sock is not None:
                sock.close(linger=100)
        if self._context is not None:
            self._context.term()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send what one step changed, as one batch."""
        if not self._options.enabled or not events:
            return
        batch = EventBatch(ts=time.time(), events=tuple(self._wire(event) for event in events), dp_rank=0)
        self._send(encode_batch(batch, "array" if self._options.as_arrays else "map"))

    def publish_store_copy(self, event: Stored) -> None:
        """Tell that blocks lie in the store now.

        The Mooncake store connector says it block by block, writes its medium in lower case, gives no extra
        keys and never removes what it announced (vLLM 0.32, `mooncake/store/worker.py`).
        """
        if not self._options.enabled:
            return
        as_int, size = self._options.hashes_as_int, self._block_size
        parent = None if event.parent is None else external_hash(event.parent, as_int=as_int)
        stored: list[Any] = []
        for index, block_hash in enumerate(event.hashes):
            name = external_hash(block_hash, as_int=as_int)
            fields = {
                "type": "BlockStored",
                "block_hashes": [name],
                "parent_block_hash": parent,
                "token_ids": event.tokens[index * size : (index + 1) * size],
                "block_size": size,
                "lora_id": None,
                "medium": "cpu",
                "lora_name": None,
                "group_idx": 0,
            }
            # In the array form the fields of the cache group come after extra_keys, which is not given.
            stored.append(list(fields.values())[:8] if self._options.as_arrays else fields)
            parent = name
        self._send(msgspec.msgpack.encode([time.time(), stored, 0]))

    def _send(self, payload: bytes) -> None:
        assert self._pub is not None
        message = Message(self._topic, self._next_sequence, payload)
        self._next_sequence += 1
        if self._faults.take("lose_events"):
            return
        self._buffer.append(message)
        if not self._faults.take("drop_events"):
            # A PUB socket never blocks: the frames are in its pipes when this returns.
            self._pub.send_multipart(publication(message), zmq.DONTWAIT)

    def _wire(self, event: CacheEvent) -> Event:
        as_int = self._options.hashes_as_int
        if isinstance(event, Stored):
            return BlockStored(
                hashes=tuple(external_hash(one, as_int=as_int) for one in event.hashes),
                parent=None if event.parent is None else external_hash(event.parent, as_int=as_int),
                token_ids=array.array("I", event.tokens),
                block_size=self._block_size,
                cache_salt=event.salt,
            )
        if isinstance(event, Removed):
            return BlockRemoved(hashes=(external_hash(event.hash, as_int=as_int),))
        return AllBlocksCleared()

    async def _serve_replay(self, sock: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sock.recv_multipart()
            try:
                client, first = parse_replay_request(frames)
            except ValueError as error:
                LOG.warning("replay: %s", error)
                continue
            for message in list(self._buffer):
                if message.sequence >= first:
                    await sock.send_multipart(replay_answer(client, message))
            await sock.send_multipart(replay_end(client, topic=self._topic))

    def _resolved(self, sock: zmq.asyncio.Socket) -> str:
        endpoint = sock.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode().replace("0.0.0.0", self._host_ip)


def _binds(endpoint: str) -> bool:
    return any(part in endpoint for part in ("*", "::", "ipc://", "inproc://"))
