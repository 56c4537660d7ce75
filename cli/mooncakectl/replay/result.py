"""What a replay showed, in numbers. All durations are model seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from mooncake_core.percentiles import percentile
from mooncakectl.console import write_file
from mooncakectl.replay.outcome import Outcome, OutcomeKind


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """A latency in model seconds; None where there is nothing to measure."""

    mean_s: float | None = None
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a replay."""

    requests: int
    """Sent; those of the trace that an interruption left out are not among them."""
    completed: int
    refused: int
    failed: int
    lost: int
    interrupted: int
    refused_by_reason: dict[str, int]
    failed_by_reason: dict[str, int]
    lost_by_reason: dict[str, int]
    token_hit_rate: float | None
    """Cached over all prompt tokens of completed requests; None when the server does not report it."""
    goodput: float
    """Share of the requests that completed within both SLOs."""
    goodput_requests_per_s: float
    ttft: Percentiles
    tbt: Percentiles
    """Of each request's TBT: the mean of its longest 10 % of gaps."""
    duration_s: float
    """From the first request sent to the last answer."""
    requests_per_s: float
    """Completed ones."""
    prompt_tokens: int
    """Of completed requests, as all the following."""
    cached_tokens: int
    completion_tokens: int
    output_tokens_per_s: float
    slo_ttft_s: float
    slo_tbt_s: float
    time_scale: float
    """Model seconds that passed in one wall second."""
    speed: float
    """Trace seconds that passed in one wall second."""
    late_s: float
    """The most by which this client was behind the trace, in wall seconds; more than a little spoils it."""
    model: str = ""
    run: str = ""
    """Names this replay: its requests had the ids `replay-<run>-<index>`."""
    outcomes: Sequence[Outcome] = ()
    """Each request's end, in wall seconds; not part of the summary that is written."""

    def write_json(self, path: Path) -> None:
        """Write the summary to a file, one JSON object."""
        summary = msgspec.to_builtins(self)
        del summary["outcomes"]
        write_file(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")

    def write_records(self, path: Path) -> None:
        """Write each request's end to a file, one JSON object a line, in the order of the trace."""
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.index)
        write_file(path, b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in ordered))


def summarise(
    outcomes: Sequence[Outcome],
    *,
    slo_ttft_s: float,
    slo_tbt_s: float,
    time_scale: float,
    speed: float,
    late_s: float,
    model: str = "",
    run: str = "",
) -> ReplayResult:
    """Work out the summary; SLOs are model seconds, `late_s` is wall seconds."""
    done = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.COMPLETED]
    kinds = Counter(outcome.kind for outcome in outcomes)
    judged = len(outcomes) - kinds[OutcomeKind.INTERRUPTED]
    duration_s = _span_s(outcomes) * time_scale
    effective = sum(_effective(outcome, slo_ttft_s / time_scale, slo_tbt_s / time_scale) for outcome in done)
    told = [outcome for outcome in done if outcome.cached_tokens is not None]
    told_prompt_tokens = sum(outcome.prompt_tokens for outcome in told)
    cached_tokens = sum(outcome.cached_tokens or 0 for outcome in told)
    completion_tokens = sum(outcome.completion_tokens for outcome in done)
    return ReplayResult(
        requests=len(outcomes),
        completed=len(done),
        refused=kinds[OutcomeKind.REFUSED],
        failed=kinds[OutcomeKind.FAILED],
        lost=kinds[OutcomeKind.LOST],
        interrupted=kinds[OutcomeKind.INTERRUPTED],
        refused_by_reason=_reasons(outcomes, OutcomeKind.REFUSED),
        failed_by_reason=_reasons(outcomes, OutcomeKind.FAILED),
        lost_by_reason=_reasons(outcomes, OutcomeKind.LOST),
        token_hit_rate=cached_tokens / told_prompt_tokens if told_prompt_tokens else None,
        goodput=effective / judged if judged else 0.0,
        goodput_requests_per_s=_rate(effective, duration_s),
        ttft=_percentiles((outcome.ttft_s for outcome in done), time_scale),
        tbt=_percentiles((outcome.tbt_s for outcome in done), time_scale),
        duration_s=duration_s,
        requests_per_s=_rate(len(done), duration_s),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in done),
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        output_tokens_per_s=_rate(completion_tokens, duration_s),
        slo_ttft_s=slo_ttft_s,
        slo_tbt_s=slo_tbt_s,
        time_scale=time_scale,
        speed=speed,
        late_s=late_s,
        model=model,
        run=run,
        outcomes=outcomes,
    )


def _effective(outcome: Outcome, slo_ttft_wall_s: float, slo_tbt_wall_s: float) -> bool:
    # One token alone has no gap to be late in.
    return (
        outcome.ttft_s is not None
        and outcome.ttft_s <= slo_ttft_wall_s
        and (outcome.tbt_s is None or outcome.tbt_s <= slo_tbt_wall_s)
    )


def _reasons(outcomes: Iterable[Outcome], kind: OutcomeKind) -> dict[str, int]:
    counted = Counter(outcome.reason for outcome in outcomes if outcome.kind is kind)
    return dict(counted.most_common())


def _span_s(outcomes: Sequence[Outcome]) -> float:
    if not outcomes:
        return 0.0
    return max(outcome.ended_s for outcome in outcomes) - min(outcome.started_s for outcome in outcomes)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _percentiles(values_s: Iterable[float | None], time_scale: float) -> Percentiles:
    ordered = sorted(value * time_scale for value in values_s if value is not None)
    if not ordered:
        return Percentiles()

    return Percentiles(
        mean_s=sum(ordered) / len(ordered),
        p50_s=percentile(ordered, 0.5),
        p90_s=percentile(ordered, 0.9),
        p99_s=percentile(ordered, 0.99),
    )
