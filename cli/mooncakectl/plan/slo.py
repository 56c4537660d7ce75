"""What a manifest promises its users, and whether a run kept it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_core.api.scalars import duration_s
from mooncake_core.api.slo import SloSpec, SloTarget
from mooncake_simulator.cluster.outcome import Result


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of all requests, and what they stay within."""

    share: float
    target_s: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """Of the time to first token, and of the time between tokens; None where there is none."""

    ttft: Objective | None
    tbt: Objective | None


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of it a run kept: shares of all requests; who was refused, was not served in time."""

    ttft: float
    tbt: float
    refused: float

    def keeps(self, objectives: Objectives) -> bool:
        """Whether both shares are reached."""
        return not missed(self, objectives)


def objectives_of(slo: SloSpec) -> Objectives:
    """What a manifest promises.

    Raises:
        ValueError: nothing, or multiples of an idle request's times.
    """
    if slo.ttft is None and slo.tbt is None:
        raise ValueError(
            "spec.slo: nothing to plan for: write e.g. ttft: {percentile: 90, target: 2s} and "
            "tbt: {percentile: 90, target: 100ms}"
        )
    return Objectives(_objective(slo.ttft, "ttft"), _objective(slo.tbt, "tbt"))


def _objective(target: SloTarget | None, name: str) -> Objective | None:
    if target is None:
        return None
    if target.target is None:
        raise ValueError(
            f"spec.slo.{name}.multiplier is not yet planned for: write spec.slo.{name}.target, e.g. 2s"
        )
    return Objective(target.percentile / 100, duration_s(target.target))


def kept(result: Result, objectives: Objectives) -> Kept:
    """What a run kept of it."""
    served = [outcome for outcome in result.outcomes if outcome.completed]
    ttft, tbt = objectives.ttft, objectives.tbt
    in_time = sum(ttft is None or (o.ttft_s is not None and o.ttft_s <= ttft.target_s) for o in served)
    steady = sum(tbt is None or o.tbt_s is None or o.tbt_s <= tbt.target_s for o in served)
    requests = max(1, result.requests)
    return Kept(in_time / requests, steady / requests, result.refused / requests)


def worst(seeds: Sequence[Kept]) -> Kept:
    """What is certain, whatever the chance: the worst of each."""
    return Kept(
        min(each.ttft for each in seeds), min(each.tbt for each in seeds), max(each.refused for each in seeds)
    )


def missed(kept: Kept, objectives: Objectives) -> str:
    """Which promise was broken, in words; empty where none was."""
    said = []
    for name, objective, share in (
        ("TTFT", objectives.ttft, kept.ttft),
        ("TBT", objectives.tbt, kept.tbt),
    ):
        if objective is not None and share < objective.share - 1e-9:
            said.append(f"{name} kept for {share:.1%} of {objective.share:.0%}")
    return ", ".join(said)
