"""Which simulations a command line asks for, and what they said together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.percentiles import percentile
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.contents import Rule
from mooncake_simulator.cluster.failures import Failure
from mooncake_simulator.cluster.manifest import with_prefill
from mooncake_simulator.cluster.outcome import Result
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import Request, jitter
from mooncakectl.simulate.conditions import under
from mooncakectl.simulate.curves import Curves, curves_of


@dataclass(frozen=True, slots=True)
class Question:
    """One set-up, to be run once for each seed."""

    spec: ClusterSpec
    speed: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the seeds of one set-up said: the median of each figure."""

    question: Question
    figures: dict[str, float | None]
    curves: Curves
    """Of the first seed."""
    copied_blocks: int | None = None
    """Of hot blocks, to other nodes of the store, in the first seed; None where it has no tiers."""

    def document(self) -> dict[str, Any]:
        """For machines. Times in seconds, shares of all requests."""
        spec = self.question.spec
        return {
            "prefill": spec.prefill,
            "decode": spec.decode,
            "profile": spec.profile.name,
            "policy": spec.policy,
            "admission": spec.admission.value,
            "speed": self.question.speed,
            "tiers": None if spec.tiers is None else spec.tiers.rule,
            **self.figures,
            "refused_by_reason": self.curves.refused_by_reason,
            "prompt_tokens": self.curves.prompt_tokens,
            "copied_blocks": self.copied_blocks,
            "promoted_blocks": self.curves.promoted_blocks,
        }


def questions(
    bases: Sequence[ClusterSpec],
    *,
    policies: Sequence[str] = (),
    admissions: Sequence[AdmissionMode] = (),
    speeds: Sequence[float] = (1.0,),
    prefill: Sequence[int] = (),
    tiers: Sequence[Rule] = (),
    die: Sequence[Failure] = (),
    load_age_s: float = 0.0,
    copies: bool = False,
) -> list[Question]:
    """Every combination of what is to be compared; what is not given stays as in the manifest.

    `bases` is the manifest's cluster, once for each kind of hardware.

    Raises:
        ValueError: some of it cannot be.
    """
    return [
        Question(replace(each, policy=policy, admission=admission), speed)
        for base in bases
        for spec in [with_prefill(base, count) for count in prefill] or [base]
        for each in under(spec, tiers, die, load_age_s, copies=copies)
        for speed in speeds
        for policy in policies or (base.policy,)
        for admission in admissions or (base.admission,)
    ]


def answer(
    question: Question,
    trace: Sequence[Request],
    seeds: Sequence[int],
    *,
    jitter_ms: float = 0.0,
    on_arrival: Callable[[], None] | None = None,
) -> Answer:
    """Run one set-up with each seed, of which there is at least one."""
    found: list[dict[str, float | None]] = []
    curves: Curves | None = None
    copied: int | None = None
    for seed in seeds:
        result = simulate(
            question.spec,
            jitter(trace, jitter_ms, seed) if jitter_ms else trace,
            speed=question.speed,
            seed=seed,
            on_arrival=on_arrival,
        )
        found.append(dict(_figures(result)))
        if curves is None:
            curves = curves_of(question.spec, result)
            copied = None if result.tiers is None else result.tiers.copied_blocks
    assert curves is not None
    figures = {name: _median([each[name] for each in found]) for name in found[0]}
    return Answer(question, figures, curves, copied)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _figures(result: Result) -> Iterator[tuple[str, float | None]]:
    ttfts_s, tbts_s = result.ttfts_s(), result.tbts_s()
    yield "requests", result.requests
    yield "completed", result.completed
    yield "refused", result.refused
    yield "failed", result.failed
    yield "wasted_prefills", result.wasted_prefills
    yield "goodput", result.goodput
    yield "token_goodput", result.token_goodput
    yield "token_hit_rate", result.token_hit_rate
    for name, values_s in (("ttft", ttfts_s), ("tbt", tbts_s)):
        yield f"{name}_mean_s", sum(values_s) / len(values_s) if values_s else None
        for share in (50, 90, 99):
            yield f"{name}_p{share}_s", percentile(values_s, share / 100) if values_s else None
    for name, errors_s in zip(("ttft", "tbt"), result.prediction_errors_s(), strict=True):
        amounts_s = sorted(abs(each) for each in errors_s)
        for share in (50, 90):
            yield f"{name}_error_p{share}_s", percentile(amounts_s, share / 100) if amounts_s else None
    amounts_tokens = sorted(abs(each) for each in result.output_errors_tokens())
    for share in (50, 90):
        error_tokens = percentile(amounts_tokens, share / 100) if amounts_tokens else None
        yield f"output_error_p{share}_tokens", error_tokens
    yield "prefill_swing", result.prefill_swing
    yield "prefill_utilisation", _utilisation(result.prefill_busy_s, result.span_s)
    yield "decode_utilisation", _utilisation(result.decode_busy_s, result.span_s)


def _utilisation(busy_s: Sequence[float], span_s: float) -> float | None:
    return sum(busy_s) / len(busy_s) / span_s if busy_s and span_s else None
