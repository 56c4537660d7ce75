"""What the batching scheduler decides and what it asks: the work of a step, how long it takes, who has KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.engine.sequence import Sequence


class Connector(Protocol):
    """Where KV beyond local HBM may come from, and who may still need it when a sequence ends."""

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the local ones; None = not known yet, ask again next step."""

    def keeps_blocks(self, sequence: Sequence, finish_reason: str) -> bool:
        """Whether the blocks of an ended sequence stay until `batching.Scheduler.release_held`."""


class NoConnector:
    """A single engine without a KV connector."""

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        return 0

    def keeps_blocks(self, sequence: Sequence, finish_reason: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Work:
    """The share of one sequence in a step."""

    sequence: Sequence
    tokens: int
    decode: bool


@dataclass(slots=True)
class Step:
    """One pass of the model over a batch."""

    work: list[Work] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks wait for KV from outside."""

    def duration_s(self, cost: CostModel) -> float:
        """Model seconds: one decode step for all that decode, plus each chunk's share of its prefill.

        A step in which a prompt ends lasts until the last stage is done with it; here the next one begins
        only then, which costs a busy pipeline a little more than real ones, whose stages take turns.
        """
        batch = kv_tokens = 0
        seconds = start_s = 0.0
        ends = False
        for item in self.work:
            start = item.sequence.computed
            if item.decode:
                batch += 1
                kv_tokens += start
            else:
                end = start + item.tokens
                seconds += cost.b_s_per_token * item.tokens + cost.c_s_per_token2 * (
                    end * end - start * start
                )
                if end >= len(item.sequence.tokens):
                    ends = True
                    start_s += cost.a_s
        if ends:
            seconds *= cost.stages
        return start_s + seconds + (cost.step_s(batch, kv_tokens) if batch else 0.0)


@dataclass(slots=True)
class CacheCounts:
    """Tokens asked of and found in the caches at admission."""

    queries: int = 0
    hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0
