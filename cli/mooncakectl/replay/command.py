"""`mooncakectl replay`."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop
from mooncake_simulator.workloads import Request, TraceError, jitter, parse_quantity, read_trace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mooncakectl.replay.driver import Progress as ReplayProgress
from mooncakectl.replay.driver import ReplayOptions, replay
from mooncakectl.replay.outcome import OutcomeKind
from mooncakectl.replay.result import ReplayResult
from mooncakectl.replay.table import summary_table
from mooncakectl.replay.target import TargetError

_LINE_EVERY_S: Final = 10.0


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("replay", help="Replay a trace against an OpenAI-compatible server and measure it.")(command)


def command(
    trace: Annotated[Path, typer.Option(help="Trace file: JSON lines as released with the Mooncake paper.")],
    url: Annotated[str, typer.Option(help="Base URL of the server.")] = "http://127.0.0.1:8000",
    speed: Annotated[float, typer.Option(help="Trace seconds per wall second.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many requests at the start.")] = 0,
    seed: Annotated[
        int, typer.Option(help="Which tokens stand for the blocks; another seed shares nothing.")
    ] = 0,
    jitter_ms: Annotated[
        float, typer.Option(min=0, help="Spread arrivals evenly over so many trace milliseconds.")
    ] = 0,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; default: the first one listed.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=1, help="Token ids are below this.")] = 32_000,
    api_key: Annotated[str | None, typer.Option(envvar="MOONCAKE_API_KEY", help="Bearer key.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Wall seconds a request may take.")] = 600.0,
    concurrency_cap: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way; the rest wait.")
    ] = None,
    slo_ttft: Annotated[str, typer.Option(help="TTFT that a good answer keeps, in model time.")] = "30s",
    slo_tbt: Annotated[str, typer.Option(help="TBT that a good answer keeps, in model time.")] = "100ms",
    json: Annotated[Path | None, typer.Option(help="Write the summary to this file.")] = None,
) -> None:
    """Replay a trace: its requests at its times, divided by the speed, as streamed completions."""
    console = Console(stderr=True)
    try:
        options = ReplayOptions(
            url=url,
            model=model,
            api_key=api_key,
            speed=speed,
            seed=seed,
            vocabulary_size=vocabulary,
            timeout_s=timeout,
            concurrency_cap=concurrency_cap,
            slo_ttft_s=_duration_s("--slo-ttft", slo_ttft),
            slo_tbt_s=_duration_s("--slo-tbt", slo_tbt),
        )
        requests = read_trace(trace, skip=skip, limit=limit)
        if not requests:
            raise TraceError(f"{trace}: no requests left to replay")
        if jitter_ms:
            requests = jitter(requests, jitter_ms, seed)
        with _shown(console, len(requests)) as on_progress:
            result = run(requests, options, on_progress)
        if json is not None:
            result.write_json(json)
    except (TraceError, TargetError, ValueError, OSError) as error:
        console.print(f"[red]mooncakectl replay:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    Console().print(summary_table(result))
    if result.interrupted or result.requests < len(requests):
        raise typer.Exit(130)


def run(
    trace: list[Request], options: ReplayOptions, on_progress: Callable[[ReplayProgress], None] | None
) -> ReplayResult:
    """Replay on an event loop of its own; the first Ctrl-C ends it with a summary of what ran."""

    async def until_stopped() -> ReplayResult:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        return await replay(trace, options, on_progress, stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(until_stopped())


@contextmanager
def _shown(console: Console, total: int) -> Iterator[Callable[[ReplayProgress], None]]:
    """A progress bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _line_now_and_then()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("replay", total=total, told="")
        yield lambda progress: bar.update(task, completed=progress.done, told=_told(progress))


def _line_now_and_then() -> Callable[[ReplayProgress], None]:
    last_s = time.monotonic()

    def show(progress: ReplayProgress) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _LINE_EVERY_S:
            last_s = now_s
            print(f"replay: {progress.done} of {progress.total} done, {_told(progress)}", file=sys.stderr)

    return show


def _told(progress: ReplayProgress) -> str:
    counts = [
        f"{number} {kind.value}"
        for kind, number in progress.ended.items()
        if number and kind is not OutcomeKind.COMPLETED
    ]
    return ", ".join([f"{progress.sent - progress.done} under way", *counts])


def _duration_s(option: str, text: str) -> float:
    try:
        return parse_quantity(text)
    except ValueError:
        raise ValueError(f"{option} {text}: expected seconds, or a number with ms, s, m or h") from None
