"""`mooncakectl workload generate` and `mooncakectl workload stats`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn, get_args

import msgspec
import typer
from rich.table import Table

from mooncake_simulator.workloads import (
    CONVERSATION,
    Distribution,
    Request,
    SessionShape,
    TraceError,
    TraceStatistics,
    describe,
    generate,
    parse_distribution,
    read_trace,
    token_hit_rate,
    write_trace,
)
from mooncake_simulator.workloads.sessions import Arrival
from mooncake_simulator.workloads.summary import Sizes
from mooncakectl.console import CommandError, check_writable, report_error, shown_progress, write_file
from mooncakectl.console import out as stdout

_FORMS = "const:X, uniform:LOW:HIGH, exp:MEAN, lognormal:MEDIAN:SIGMA, geometric:MEAN or quantiles:…"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(help="Make a trace, or say what is in one.", no_args_is_help=True)
    group.command("generate", help="Make a trace of multi-turn sessions.")(generate_command)
    group.command("stats", help="Sizes, rates and reuse of a trace.")(stats_command)
    app.add_typer(group, name="workload")


def generate_command(
    out: Annotated[Path, typer.Option(help="Where to write the trace.")],
    sessions: Annotated[int, typer.Option(min=1, help="How many sessions.")] = 100,
    turns: Annotated[
        str, typer.Option(help=f"Requests in a session: a number or a distribution ({_FORMS}).")
    ] = CONVERSATION.turns.text,
    gap: Annotated[str, typer.Option(help="Time between turns, from arrival to arrival.")] = (
        CONVERSATION.gap_s.text
    ),
    seed: Annotated[int, typer.Option(help="The same seed makes the same trace.")] = 0,
    arrival: Annotated[
        str, typer.Option(help=f"How sessions arrive: {', '.join(get_args(Arrival))}.")
    ] = CONVERSATION.arrival,
    rate: Annotated[float, typer.Option(help="New sessions a second.")] = CONVERSATION.sessions_per_s,
    burst: Annotated[int, typer.Option(min=1, help="Sessions in a burst.")] = CONVERSATION.burst,
    system_prompts: Annotated[int, typer.Option(min=1, help="How many system prompts are shared.")] = (
        CONVERSATION.system_prompts
    ),
    system_tokens: Annotated[str, typer.Option(help="Length of a system prompt.")] = (
        CONVERSATION.system_tokens.text
    ),
    first_tokens: Annotated[str, typer.Option(help="New text in the first turn.")] = (
        CONVERSATION.first_tokens.text
    ),
    user_tokens: Annotated[str, typer.Option(help="New text in each further turn.")] = (
        CONVERSATION.user_tokens.text
    ),
    output_tokens: Annotated[
        str, typer.Option(help="Length of an answer.")
    ] = CONVERSATION.output_tokens.text,
    max_input_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = (
        CONVERSATION.max_input_tokens
    ),
) -> None:
    """Make a trace. The defaults follow the published statistics of the conversation trace."""
    try:
        check_writable("--out", out)
        if arrival not in get_args(Arrival):
            raise ValueError(f"--arrival {arrival}: expected one of {', '.join(get_args(Arrival))}")
        shape = SessionShape(
            turns=_distribution("--turns", turns),
            gap_s=_distribution("--gap", gap),
            arrival=msgspec.convert(arrival, Arrival),
            sessions_per_s=rate,
            burst=burst,
            system_prompts=system_prompts,
            system_tokens=_distribution("--system-tokens", system_tokens),
            first_tokens=_distribution("--first-tokens", first_tokens),
            user_tokens=_distribution("--user-tokens", user_tokens),
            output_tokens=_distribution("--output-tokens", output_tokens),
            max_input_tokens=max_input_tokens,
        )
        with shown_progress() as bar:
            task = bar.add_task("sessions", total=sessions)
            requests = generate(sessions, seed, shape, lambda done: bar.update(task, completed=done))
            write_trace(out, requests)
    except (ValueError, TraceError, CommandError) as error:
        _fail(error)
    stdout.print(_table(str(out), describe(requests)))


def stats_command(
    file: Annotated[Path, typer.Argument(help="Trace file.")],
    capacity: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Also the hit rate of an LRU cache of so many blocks; may be repeated."),
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many requests at the start.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the statistics to this file.")] = None,
) -> None:
    """Say what is in a trace."""
    try:
        if json is not None:
            check_writable("--json", json, file)
        requests = read_trace(file, skip=skip, limit=limit)
        statistics = describe(requests)
        rates = {blocks: _hit_rate(requests, blocks) for blocks in capacity or ()}
        if json is not None:
            write_file(json, msgspec.json.format(msgspec.json.encode(statistics), indent=2) + b"\n")
    except (ValueError, CommandError) as error:
        _fail(error)
    table = _table(str(file), statistics)
    for blocks, rate in rates.items():
        table.add_row(f"token hit rate, LRU of {blocks:,} blocks", f"{rate:.3f}")
    stdout.print(table)


def _hit_rate(requests: list[Request], blocks: int) -> float:
    with shown_progress() as bar:
        task = bar.add_task(f"LRU of {blocks:,} blocks", total=len(requests))
        return token_hit_rate(requests, blocks, lambda done: bar.update(task, completed=done))


def _distribution(option: str, text: str) -> Distribution:
    try:
        return parse_distribution(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _fail(error: Exception) -> NoReturn:
    report_error(str(error))
    raise typer.Exit(1) from None


def _table(title: str, statistics: TraceStatistics) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("requests", f"{statistics.requests:,}")
    table.add_row("span", f"{statistics.span_s:,.1f} s")
    table.add_row("arrivals", f"{statistics.requests_per_s:.2f} requests/s")
    table.add_row("input tokens", _sizes(statistics.input_tokens))
    table.add_row("output tokens", _sizes(statistics.output_tokens))
    table.add_row(
        "total tokens in / out", f"{statistics.total_input_tokens:,} / {statistics.total_output_tokens:,}"
    )
    table.add_row("blocks / unique", f"{statistics.blocks:,} / {statistics.unique_blocks:,}")
    table.add_row("token hit rate, cache without limits", f"{statistics.token_hit_rate:.3f}")
    return table


def _sizes(sizes: Sizes) -> str:
    return (
        f"mean {sizes.mean:,.0f}  P50 {sizes.p50:,.0f}  P90 {sizes.p90:,.0f}  "
        f"P99 {sizes.p99:,.0f}  max {sizes.max:,.0f}"
    )
