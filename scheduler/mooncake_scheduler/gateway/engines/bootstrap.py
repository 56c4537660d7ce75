"""The engine ids behind Mooncake bootstrap servers.

A prefill engine has a new id after every restart. A decode told an old one fails, or hangs until its
timeout (smg#2491), so ids are kept only as long as nothing points to a restart: the same epoch, no failure
seen, and never once all connections to the engine were closed and opened anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple

import msgspec
import structlog

from mooncake_core.registry import Instance
from mooncake_scheduler.gateway.body import UNREADABLE
from mooncake_scheduler.gateway.http1 import Upstream
from mooncake_scheduler.gateway.http1.simple import fetch

_log = structlog.get_logger(__name__)

QUERY_TIMEOUT_S = 2.0


class _Rank(msgspec.Struct):
    engine_id: str


_RANKS = msgspec.json.Decoder(dict[str, _Rank])


class Rank(NamedTuple):
    """One data-parallel rank of a prefill engine."""

    number: int
    engine_id: str


class _Known(NamedTuple):
    epoch: int
    generation: int
    ranks: tuple[Rank, ...]


class _Question(NamedTuple):
    """One under way, of one life of an instance."""

    epoch: int
    generation: int
    task: asyncio.Task[tuple[Rank, ...]]


class EngineIds:
    """Asks bootstrap servers for engine ids and remembers the answers while they can be trusted."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, _Question] = {}
        self._tasks: set[asyncio.Task[tuple[Rank, ...]]] = set()
        self._servers: dict[str, Upstream] = {}

    def known(self, instance: Instance, generation: int) -> tuple[Rank, ...] | None:
        """The ranks of an instance; None when they have to be asked for.

        Args:
            instance: a prefill instance.
            generation: of its upstream; another one means the engine may have restarted since.
        """
        known = self._known.get(instance.id)
        if known is None or known.epoch != instance.epoch or known.generation != generation:
            return None
        return known.ranks

    def needed(self, instance: Instance, generation: int) -> bool:
        """Whether the ranks of an instance have to be asked for and nobody does so already."""
        return self._under_way(instance, generation) is None and self.known(instance, generation) is None

    def forget(self, instance_id: str) -> None:
        """A failure makes the id doubtful: ask again before the next hand-over."""
        self._known.pop(instance_id, None)
        # A question under way may have been answered before the failure: who asked takes it, nobody else.
        self._asking.pop(instance_id, None)

    def keep(self, present: Collection[Instance]) -> None:
        """Forget the instances that are not among these, and close what is open to their servers."""
        ids = {instance.id for instance in present}
        urls = {instance.bootstrap_url for instance in present}
        for gone in self._known.keys() - ids:
            del self._known[gone]
        for url in self._servers.keys() - urls:
            self._servers.pop(url).retire()

    def asking(self, instance: Instance, generation: int) -> asyncio.Future[tuple[Rank, ...]]:
        """Ask the bootstrap server; several requests that need it share one question.

        The future raises ConnectionError when it does not answer, or not as a bootstrap server does.
        """
        question = self._under_way(instance, generation)
        if question is None:
            task = asyncio.ensure_future(self._ask(instance))
            self._tasks.add(task)
            question = self._asking[instance.id] = _Question(instance.epoch, generation, task)
            asked = question
            task.add_done_callback(lambda _: self._answered(instance.id, asked))
        return asyncio.shield(question.task)

    def _under_way(self, instance: Instance, generation: int) -> _Question | None:
        question = self._asking.get(instance.id)
        if question is None or (question.epoch, question.generation) != (instance.epoch, generation):
            return None
        return question

    def _answered(self, instance_id: str, question: _Question) -> None:
        self._tasks.discard(question.task)
        if self._asking.get(instance_id) is not question:
            return
        del self._asking[instance_id]
        if question.task.cancelled() or question.task.exception() is not None:
            return
        ranks, before = question.task.result(), self._known.get(instance_id)
        if before is not None and before.ranks != ranks:
            _log.info("engine ids changed", instance=instance_id)
        self._known[instance_id] = _Known(question.epoch, question.generation, ranks)

    async def _ask(self, instance: Instance) -> tuple[Rank, ...]:
        url = instance.bootstrap_url
        server = self._servers.get(url)
        if server is None:
            try:
                server = self._servers[url] = Upstream(url)
            except ValueError as error:
                raise ConnectionError(f"bootstrap_url of {instance.id}: {error}") from None
        status, body = await fetch(server, b"GET", b"/query", timeout_s=QUERY_TIMEOUT_S)
        try:
            answered = _RANKS.decode(body) if status == 200 else {}
            ranks = tuple(sorted(Rank(int(number), rank.engine_id) for number, rank in answered.items()))
        except (*UNREADABLE, ValueError) as error:
            raise ConnectionError(f"{url}/query of {instance.id}: {error}") from None
        if not ranks:
            raise ConnectionError(f"{url}/query of {instance.id}: status {status} without an engine id")
        return ranks

    def close(self) -> None:
        """Close the connections to the bootstrap servers."""
        for task in self._tasks:
            task.cancel()
        for server in self._servers.values():
            server.close()
