"""`mooncakectl demo`: a whole cluster, a workload through it, what its users saw, and nothing left behind."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncakectl.commands.up import print_event, read
from mooncakectl.console import CommandError, check_writable, out, say

if TYPE_CHECKING:
    from mooncake_simulator.workloads import Request
    from mooncakectl.local.cluster import Definition
    from mooncakectl.replay import ReplayOptions, ReplayResult
    from mooncakectl.session import Session

_TURNS = 5
_READY_WITHIN_S = 90.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    file: Annotated[Path, typer.Option("--file", "-f", help="The manifest with the MooncakeCluster.")],
    requests: Annotated[
        int, typer.Option(min=1, help="How many to send, as conversations of 5 turns.")
    ] = 240,
    speed: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Workload seconds per wall second.", show_default="the engines' time scale"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another workload.")] = 1,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Where clients reach the cluster.")
    ] = None,
    secrets: Annotated[
        Path | None, typer.Option(help="Folder with Secrets: NAME/KEY files, or Secret manifests.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOONCAKE_API_KEY", help="Bearer key, where the cluster wants one.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Run a cluster on this machine, send conversations through it, print what its users saw, stop it."""
    if speed is not None and not speed < float("inf"):
        raise CommandError(f"--speed {speed:g}: write a number, e.g. 10")
    if json_file is not None:
        check_writable("--json", json_file)
    definition = read(file)
    if definition.wants_key and api_key is None:
        raise CommandError("this cluster wants an API key: give one of its Secret's with --api-key")
    trace = workload(requests, seed)
    options = _options(definition, speed or definition.time_scale, api_key)
    result = asyncio.run(_demo(definition, trace, options, port, secrets))
    from mooncakectl.replay.table import summary_table

    out.print(summary_table(result))
    if json_file is not None:
        result.write_json(json_file)
    if result.interrupted or result.requests < requests:
        raise typer.Exit(130)
    if result.lost or result.failed or not result.completed:
        raise CommandError(f"{result.lost} requests were lost and {result.failed} failed")


def workload(requests: int, seed: int) -> list[Request]:
    """Conversations of five turns that share system prompts, in the order of their requests' arrival.

    About one request in two model seconds: well within what two prefill instances carry, so that the figures
    show reuse and not queueing.
    """
    from mooncake_simulator.workloads import SessionShape, generate, parse_distribution

    shape = SessionShape(
        turns=parse_distribution(f"const:{_TURNS}"),
        gap_s=parse_distribution("lognormal:30s:0.6"),
        sessions_per_s=0.15,
        system_prompts=3,
        system_tokens=parse_distribution("const:2048"),
        first_tokens=parse_distribution("lognormal:6k:0.8"),
        user_tokens=parse_distribution("lognormal:800:1.0"),
        output_tokens=parse_distribution("lognormal:150:0.7"),
    )
    return generate(math.ceil(requests / _TURNS), seed, shape)[:requests]


async def _demo(
    definition: Definition,
    trace: list[Request],
    options: ReplayOptions,
    port: int | None,
    secrets: Path | None,
) -> ReplayResult:
    import msgspec

    from mooncakectl.interrupts import Interrupts
    from mooncakectl.local import LocalRuntimeError
    from mooncakectl.replay import TargetError, replay
    from mooncakectl.replay.progress import progress_shown
    from mooncakectl.session import started

    try:
        async with started(definition, port=port, secrets_dir=secrets, on_event=print_event) as session:
            with Interrupts(session.runtime.kill) as interrupts:
                await _ready(session, interrupts.asked)
                span_s = (trace[-1].timestamp_ms - trace[0].timestamp_ms) / 1000 / options.speed
                say(f"ready at {session.cluster.endpoint}: {len(trace)} requests over {span_s:.0f} s")
                options_there = msgspec.structs.replace(options, url=session.cluster.endpoint)
                with progress_shown(len(trace)) as on_progress:
                    result = await replay(trace, options_there, on_progress, interrupts.asked)
                await session.drain_and_stop()
                return result
    except (LocalRuntimeError, TargetError) as error:
        raise CommandError(str(error)) from error


async def _ready(session: Session, asked: asyncio.Event) -> None:
    from mooncakectl.session import first_of

    ready = asyncio.create_task(session.runtime.wait_ready(_READY_WITHIN_S))
    interrupted = asyncio.create_task(_wait(asked))
    await first_of(ready, interrupted)
    if asked.is_set():
        raise KeyboardInterrupt


def _options(definition: Definition, speed: float, api_key: str | None) -> ReplayOptions:
    """How to replay; where to is known once the cluster is up."""
    import msgspec

    from mooncake_core.api.scalars import duration_s
    from mooncakectl.replay import ReplayOptions

    slo = definition.cluster.spec.slo
    targets = {
        f"slo_{name}_s": float(duration_s(target.target))
        for name, target in (("ttft", slo.ttft), ("tbt", slo.tbt))
        if target is not None and target.target is not None
    }
    # Multiples of an idle request are known to the scheduler only; the table then takes the paper's targets.
    return msgspec.structs.replace(ReplayOptions(url="", speed=speed, api_key=api_key), **targets)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
