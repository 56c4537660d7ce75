"""`mooncakectl replay`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncakectl.console import CommandError, check_writable, out, report_error

if TYPE_CHECKING:
    from mooncake_simulator.workloads import Request
    from mooncakectl.replay import Progress, ReplayOptions, ReplayResult

_INTERRUPTED: Final = 130
"""The exit code that shells give a command ended by Ctrl-C."""


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
    records: Annotated[
        Path | None, typer.Option(help="Write each request's end to this file, one JSON object a line.")
    ] = None,
) -> None:
    """Replay a trace: its requests at its times, divided by the speed, as streamed completions."""
    from mooncake_simulator.workloads import TraceError, jitter, read_trace
    from mooncakectl.replay import ReplayOptions, TargetError
    from mooncakectl.replay.progress import progress_shown
    from mooncakectl.replay.table import summary_table
    from mooncakectl.trace_times import check_jitter, check_speed

    try:
        if json is not None:
            check_writable("--json", json, trace)
        if records is not None:
            check_writable("--records", records, trace, json)
        check_jitter(jitter_ms)
        check_speed(speed)
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
        with progress_shown(len(requests)) as on_progress:
            result = _run(requests, options, on_progress)
    except (TraceError, TargetError, CommandError, ValueError) as error:
        report_error(str(error))
        raise typer.Exit(1) from None
    except asyncio.CancelledError:
        raise typer.Exit(_INTERRUPTED) from None
    out.print(summary_table(result))
    if json is not None:
        result.write_json(json)
    if records is not None:
        result.write_records(records)
    if result.interrupted or result.requests < len(requests):
        raise typer.Exit(_INTERRUPTED)


def _run(
    trace: list[Request], options: ReplayOptions, on_progress: Callable[[Progress], None]
) -> ReplayResult:
    """Replay on an event loop of its own; Ctrl-C ends it with a summary of what ran, a second one without."""
    import uvloop

    from mooncakectl.interrupts import Interrupts
    from mooncakectl.replay import replay

    async def until_stopped() -> ReplayResult:
        task = asyncio.current_task()

        def end_now() -> None:
            if task is not None:
                task.cancel()

        with Interrupts(end_now) as interrupts:
            return await replay(trace, options, on_progress, interrupts.asked)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(until_stopped())


def _duration_s(option: str, text: str) -> float:
    from mooncake_simulator.workloads import parse_quantity

    try:
        seconds = parse_quantity(text)
    except ValueError:
        raise ValueError(f"{option} {text}: expected seconds, or a number with ms, s, m or h") from None
    if not seconds < float("inf"):
        raise ValueError(f"{option} {text}: that is for ever: write a number of seconds, e.g. 30s")
    return seconds
