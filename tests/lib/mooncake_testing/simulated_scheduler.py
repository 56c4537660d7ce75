"""A simulated engine's scheduler without clock or sockets, for unit and property tests."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from mooncake_simulator.engine.batching import Scheduler
from mooncake_simulator.engine.hashing import BlockHasher
from mooncake_simulator.engine.pool import BlockPool, CacheEvent, Removed, Stored
from mooncake_simulator.engine.sequence import Emission, Limits, Sequence, Times
from mooncake_simulator.engine.steps import Connector, NoConnector


def scheduler(
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 200,
    connector: Connector | None = None,
) -> Scheduler:
    """A scheduler with small limits."""
    return Scheduler(
        BlockPool(blocks),
        BlockHasher(block_size, None),
        connector or NoConnector(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def sequence(name: str, prompt: SequenceOf[int], output: int = 4, salt: str | None = None) -> Sequence:
    """A request that generates `output` tokens."""
    return Sequence(
        id=name,
        tokens=list(prompt),
        limits=Limits(max_tokens=output),
        next_token=lambda position: 1000 + position,
        times=Times(arrived_s=0.0),
        sink=lambda _: None,
        salt=salt,
    )


def run(one: Scheduler, steps: int = 1000) -> list[Emission]:
    """Step until nothing is left to do; all that was emitted."""
    emissions: list[Emission] = []
    for _ in range(steps):
        step = one.plan()
        if not step.work:
            return emissions
        emissions += one.complete(step)
    raise AssertionError("it does not come to rest")


@dataclass
class Mirror:
    """A cache as an observer of its events sees it."""

    hashes: set[bytes] = field(default_factory=set)

    def apply(self, events: SequenceOf[CacheEvent]) -> None:
        """Follow events; a store of what is there or a removal of what is not is an error."""
        for event in events:
            if isinstance(event, Stored):
                assert self.hashes.isdisjoint(event.hashes)
                self.hashes |= set(event.hashes)
            elif isinstance(event, Removed):
                self.hashes.remove(event.hash)
            else:
                self.hashes.clear()
