"""Engines of several processes: workers join their leader over TCP, and one that is lost takes all with it.

Stands for the process group of vLLM's multiprocessing executor (`--nnodes`): the leader serves when every
rank has joined, and none of them can go on without the others. vLLM learns of a rank's death when it next
computes; here the connection tells, and a heartbeat where a machine vanished without a word.

Lines of JSON: a worker says who it is, the leader answers `{"joined": rank}` or `{"refused": why}`, then both
send empty lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from mooncake_simulator.engine.options import EngineOptions, GroupOptions

LOG = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENT_FOR_S = 30.0
"""After so many wall seconds without a heartbeat a rank counts as lost."""
_JOIN_AGAIN_S = 0.2


class GroupError(Exception):
    """The group cannot be formed, or is broken; the message says which rank and why."""


def shape(options: EngineOptions) -> dict[str, Any]:
    """What all ranks of a group must have been told alike."""
    group = options.group
    return {
        "nodes": group.nodes,
        "tensor": options.tensor_parallel_size,
        "pipeline": options.pipeline_parallel_size,
        "model": options.model,
        "block_size": options.block_size,
    }


class Leader:
    """Takes the workers in, and watches them."""

    def __init__(self, options: EngineOptions, on_lost: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            options: of the leader.
            on_lost: told why the group is broken, once it was complete.
        """
        self._group = options.group
        self._shape = shape(options)
        self._host = options.host
        self._on_lost = on_lost
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._complete = self._closing = False
        self._server: asyncio.Server | None = None

    async def gather(self) -> None:
        """Return when all ranks have joined.

        Raises:
            OSError: the port is in use.
        """
        self._server = await asyncio.start_server(self._meet, self._host, self._group.port)
        while len(self._members) < self._group.nodes - 1:
            self._changed.clear()
            await self._changed.wait()
        self._complete = True
        LOG.info("all %d ranks have joined", self._group.nodes)

    async def close(self) -> None:
        """Let the workers go."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for writer in self._members.values():
            with contextlib.suppress(OSError):
                _say(writer, {"bye": True})
                await writer.drain()
            writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        try:
            rank = self._admit(await _hear(reader), writer)
            await _keep_in_touch(reader, writer)
        except GroupError as error:
            LOG.warning("a worker is refused: %s", error)
            _say(writer, {"refused": str(error)})
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            LOG.warning("lost rank %s: %r", rank, error)
        finally:
            writer.close()
            if rank is not None:
                self._lost(rank)

    def _admit(self, hello: Mapping[str, Any], writer: asyncio.StreamWriter) -> int:
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 < rank < self._group.nodes:
            raise GroupError(f"rank {rank} is not one of 1 to {self._group.nodes - 1}; change --node-rank")
        told = hello.get("shape")
        if told != self._shape:
            raise GroupError(f"rank {rank} was told {told}, the leader {self._shape}; start all ranks alike")
        if rank in self._members:
            raise GroupError(f"rank {rank} is here already")
        self._members[rank] = writer
        _say(writer, {"joined": rank})
        LOG.info("rank %d has joined", rank)
        self._changed.set()
        return rank

    def _lost(self, rank: int) -> None:
        del self._members[rank]
        if self._complete and not self._closing:
            self._on_lost(f"rank {rank} is gone")


async def work(group: GroupOptions, told: Mapping[str, Any]) -> None:
    """Be a worker: join the leader, and stay until it lets go.

    Args:
        group: who and where.
        told: made by `shape`.

    Raises:
        GroupError: the leader refuses, or is lost.
    """
    reader, writer = await _reach(group)
    try:
        _say(writer, {"rank": group.rank, "shape": dict(told)})
        answer = await _hear(reader)
        if "joined" not in answer:
            raise GroupError(f"the leader refuses: {answer.get('refused')}")
        LOG.info("joined %s:%d as rank %d", group.host, group.port, group.rank)
        await _keep_in_touch(reader, writer)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        raise GroupError(f"the leader at {group.host}:{group.port} is lost: {error!r}") from error
    finally:
        writer.close()


async def _reach(group: GroupOptions) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, however long it takes; the name is looked up each time, a new leader has another address."""
    LOG.info("rank %d looks for its leader at %s:%d", group.rank, group.host, group.port)
    while True:
        try:
            return await asyncio.open_connection(group.host, group.port)
        except OSError as error:
            LOG.debug("leader %s:%d: %s", group.host, group.port, error)
            await asyncio.sleep(_JOIN_AGAIN_S)


async def _keep_in_touch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send heartbeats and hear them, until the other says goodbye.

    Raises:
        EOFError: it ended without a goodbye.
        TimeoutError: it is silent.
        OSError: the connection broke.
    """
    beating = asyncio.create_task(_beat(writer))
    try:
        while not (await _hear(reader)).get("bye"):
            pass
    finally:
        beating.cancel()


async def _beat(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the reading side tells of it
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            writer.write(b"\n")
            await writer.drain()


async def _hear(reader: asyncio.StreamReader) -> dict[str, Any]:
    async with asyncio.timeout(SILENT_FOR_S):
        line = await reader.readline()
    if not line:
        raise EOFError("the connection was closed")
    if not line.strip():
        return {}
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError(f"not an object: {line!r}")
    return document


def _say(writer: asyncio.StreamWriter, document: Mapping[str, Any]) -> None:
    writer.write(json.dumps(document).encode() + b"\n")
