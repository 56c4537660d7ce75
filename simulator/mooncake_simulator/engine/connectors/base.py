"""What a KV connector is asked by the engine, and what it may ask of the engine."""

from __future__ import annotations

from collections.abc import Coroutine
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from mooncake_simulator.engine.clock import ModelClock
from mooncake_simulator.engine.links import SharedLink
from mooncake_simulator.engine.metrics import EngineMetrics
from mooncake_simulator.engine.options import EngineOptions
from mooncake_simulator.engine.pool import Stored
from mooncake_simulator.engine.sequence import Sequence


class EngineHandle(Protocol):
    """The engine as its connectors see it."""

    options: EngineOptions
    clock: ModelClock
    metrics: EngineMetrics
    ingress: SharedLink
    """What the engine's NICs take in; all hand-overs to it share it."""
    egress: SharedLink

    def link(self, bytes_per_s: float) -> SharedLink:
        """A further link in the engine's model time."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the engine's loop."""

    def loaded(self, sequence: Sequence, external_tokens: int) -> None:
        """KV of so many tokens beyond the local ones has arrived."""

    def load_failed(self, sequence: Sequence, message: str, policy: str) -> None:
        """KV will not arrive: the request fails, or is computed here (policy `recompute`)."""

    def release_held(self, sequence_id: str) -> bool:
        """Free the blocks of an ended sequence that a connector kept."""

    def wake(self) -> None:
        """Something changed that the scheduler should look at."""

    def publish_store_copy(self, event: Stored) -> None:
        """Announce blocks that lie in the store now."""

    def die(self, reason: str) -> None:
        """End the process as an engine whose core has crashed."""


class KvConnector:
    """One connector; every method may be left as it is here."""

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine

    async def start(self) -> None:
        """Open sockets.

        Raises:
            OSError: an address is in use.
        """

    async def stop(self) -> None:
        """Close what `start` opened."""

    def submitted(self, sequence: Sequence) -> None:
        """A request has come in."""

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        """See `batching.Connector.matched_tokens`."""
        return 0

    def load(self, sequence: Sequence) -> None:
        """Begin to load; must end in `EngineHandle.loaded` or `load_failed`."""
        raise NotImplementedError

    def prefilled(self, sequence: Sequence) -> None:
        """The whole prompt is computed and its blocks are full of KV."""

    def keeps_blocks(self, sequence: Sequence, finish_reason: str) -> bool:
        """See `batching.Connector.keeps_blocks`."""
        return False

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        """A request has ended, in whatever way."""


class Connectors:
    """Several connectors as one, as vLLM's MultiConnector: the first that has tokens loads them."""

    def __init__(self, connectors: SequenceOf[KvConnector] = ()) -> None:
        self.all = list(connectors)
        self._loads_from: dict[str, KvConnector] = {}

    async def start(self) -> None:
        """Open the sockets of all."""
        for connector in self.all:
            await connector.start()

    async def stop(self) -> None:
        """Close the sockets of all."""
        for connector in self.all:
            await connector.stop()

    def submitted(self, sequence: Sequence) -> None:
        """Tell all of a new request."""
        for connector in self.all:
            connector.submitted(sequence)

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        """The tokens of the first connector that has any."""
        for connector in self.all:
            tokens = connector.matched_tokens(sequence, local_tokens)
            if tokens is None:
                return None
            if tokens:
                self._loads_from[sequence.id] = connector
                return tokens
        return 0

    def load(self, sequence: Sequence) -> None:
        """Let the connector that promised tokens load them."""
        self._loads_from[sequence.id].load(sequence)

    def prefilled(self, sequence: Sequence) -> None:
        """Tell all that a prompt is computed."""
        for connector in self.all:
            connector.prefilled(sequence)

    def keeps_blocks(self, sequence: Sequence, finish_reason: str) -> bool:
        """Whether any of them still needs the blocks."""
        return any([connector.keeps_blocks(sequence, finish_reason) for connector in self.all])

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        """Tell all that a request has ended."""
        self._loads_from.pop(sequence.id, None)
        for connector in self.all:
            connector.finished(sequence, finish_reason)
