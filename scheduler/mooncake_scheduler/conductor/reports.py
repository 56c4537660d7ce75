"""What engines report of themselves against what the ledger knows: work that came past it.

The ledger comes first: it is exact for whatever its schedulers placed. A report adds to it what it cannot
know, such as clients that ask an engine directly, or another router before the same fleet. A report says
nothing once it is a few seconds old, and never lowers a load: what engines have not yet seen is promised.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from mooncake_core.ledger import InstanceLoad, Limits
from mooncake_core.registry import EngineReport, Instance, Role
from mooncake_scheduler.conductor.cost import CostModel

FRESH_S = 2.0
"""Wall seconds for which a report counts in full,"""
STALE_S = 6.0
"""and from which it counts for nothing."""
TYPICAL_PROMPT_TOKENS = 2_048
"""Prompt of a request of which nothing is known."""
MOST_PROMPT_TOKENS = 131_072


class Known(NamedTuple):
    """What the ledger knew of an instance, at most, around the time of a report."""

    requests: int = 0
    kv_tokens: int = 0

    @classmethod
    def of(cls, load: InstanceLoad) -> Known:
        """What one load amounts to. A request that is prefilled where it decodes may count twice."""
        # Who waits for a turn has not reached the engine.
        return cls(load.queued - len(load.waiting) + load.batch + load.arriving, load.kv_tokens)

    def most(self, other: Known) -> Known:
        """The larger of each."""
        return Known(max(self.requests, other.requests), max(self.kv_tokens, other.kv_tokens))


class Foreign(NamedTuple):
    """Work on an instance that the ledger does not know of."""

    queued: int = 0
    queued_s: float = 0.0
    batch: int = 0
    kv_tokens: int = 0


NOTHING = Foreign()


def weight_of(age_s: float) -> float:
    """How much a report of this age in wall seconds counts, 0 to 1; one from the future is as doubtful."""
    age_s = abs(age_s)
    return min(1.0, max(0.0, (STALE_S - age_s) / (STALE_S - FRESH_S)))


def foreign_work(report: EngineReport, known: Known, instance: Instance, model: CostModel) -> Foreign:
    """What a report shows beyond the ledger.

    Args:
        report: What the engine says; running and waiting requests together are what it works at.
        known: What the ledger knew at most when it was read.
        instance: Whose it is. Prefill instances compute prompts; elsewhere only those waiting are prompts.
        model: Its cost model; tells what a queued prompt takes.
    """
    requests = max(0, report.running + report.waiting - known.requests)
    kv_tokens = max(0, int(report.kv_usage * instance.kv_capacity_tokens) - known.kv_tokens)
    if instance.role is Role.DECODE:
        return Foreign(batch=requests, kv_tokens=kv_tokens)
    queued = requests if instance.role is Role.PREFILL else min(requests, report.waiting)
    prompt_tokens = TYPICAL_PROMPT_TOKENS
    if requests and kv_tokens:
        prompt_tokens = min(MOST_PROMPT_TOKENS, max(1, kv_tokens // requests))
    return Foreign(queued, queued * model.occupied_s(prompt_tokens, 0), requests - queued, kv_tokens)


def faded(foreign: Foreign, weight: float) -> Foreign:
    """Foreign work that counts in part: whole requests and tokens, rounded to the nearest."""
    return Foreign(
        round(foreign.queued * weight),
        foreign.queued_s * weight,
        round(foreign.batch * weight),
        round(foreign.kv_tokens * weight),
    )


def with_foreign(load: InstanceLoad, foreign: Foreign) -> InstanceLoad:
    """A load raised by what the ledger does not know of. Nobody knows when it ends, so it stays."""
    return replace(
        load,
        queued=load.queued + foreign.queued,
        queued_s=load.queued_s + foreign.queued_s,
        batch=load.batch + foreign.batch,
        kv_tokens=load.kv_tokens + foreign.kv_tokens,
    )


def within_ledger(limits: Limits, prefill: Foreign, decode: Foreign) -> Limits:
    """Limits for the ledger, which compares them with what it knows alone.

    Args:
        limits: Bounds on all work.
        prefill: Foreign work where the prompt is computed.
        decode: Foreign work where the answer is.
    """
    return Limits(
        limits.queued_s - prefill.queued_s,
        # 0 is no bound.
        max(1, limits.batch - decode.batch) if limits.batch else 0,
        max(1, limits.kv_tokens - decode.kv_tokens) if limits.kv_tokens else 0,
    )
