"""The summary of a replay as a table."""

from __future__ import annotations

from rich.table import Table

from mooncakectl.console import in_seconds
from mooncakectl.replay.result import Percentiles, ReplayResult


def summary_table(result: ReplayResult) -> Table:
    """All that a reader of a replay asks for, in model seconds."""
    table = Table(
        title=f"Replay · {result.model}", caption=_time(result), show_header=False, title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    table.add_row("requests", str(result.requests), f"in {in_seconds(result.duration_s)}")
    table.add_row("completed", *_share(result.completed, result))
    table.add_row("refused", *_share(result.refused, result, result.refused_by_reason))
    table.add_row("failed", *_share(result.failed, result, result.failed_by_reason))
    table.add_row("lost", *_share(result.lost, result, result.lost_by_reason))
    if result.interrupted:
        table.add_row("interrupted", *_share(result.interrupted, result))
    table.add_section()
    table.add_row(
        "goodput",
        f"{result.goodput:.1%}",
        f"TTFT ≤ {in_seconds(result.slo_ttft_s)} and TBT ≤ {in_seconds(result.slo_tbt_s)}: "
        f"{result.goodput_requests_per_s:.2f} requests/s",
    )
    table.add_row("TTFT", *_latency(result.ttft))
    table.add_row("TBT", *_latency(result.tbt))
    table.add_row(
        "token hit rate",
        "not reported" if result.token_hit_rate is None else f"{result.token_hit_rate:.3f}",
        f"{result.cached_tokens:,} of {result.prompt_tokens:,} prompt tokens",
    )
    table.add_row(
        "throughput",
        f"{result.output_tokens_per_s:,.0f} tokens/s",
        f"{result.requests_per_s:.2f} requests/s",
    )
    return table


def _time(result: ReplayResult) -> str:
    said = f"at {result.speed:g} trace seconds per wall second"
    if result.time_scale != 1:
        pace = result.speed / result.time_scale
        said += (
            f"; the engines are simulated at {result.time_scale:g} model seconds per wall second: "
            f"times are model seconds, arrivals {pace:.2f} × the trace's"
        )
    if result.late_s > 0.1:
        said += f"; this client was up to {in_seconds(result.late_s)} late"
    return said


def _share(count: int, result: ReplayResult, reasons: dict[str, int] | None = None) -> tuple[str, str]:
    share = f"{count / result.requests:.1%}" if result.requests else ""
    told = ", ".join(f"{reason} {number}" for reason, number in (reasons or {}).items())
    return str(count), f"{share}  {told}".rstrip()


def _latency(values: Percentiles) -> tuple[str, str]:
    if values.p50_s is None or values.p90_s is None or values.p99_s is None or values.mean_s is None:
        return "–", ""
    return (
        f"P90 {in_seconds(values.p90_s)}",
        f"mean {in_seconds(values.mean_s)}  P50 {in_seconds(values.p50_s)}  P99 {in_seconds(values.p99_s)}",
    )
