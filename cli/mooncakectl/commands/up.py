"""`mooncakectl up`: a whole cluster as processes of this machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from mooncakectl.console import CommandError, err, out, print_json, say

if TYPE_CHECKING:
    from mooncakectl.local.cluster import Definition
    from mooncakectl.session import Session

_SLOW_START_S = 120.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("up")(up)


def up(
    file: Annotated[Path, typer.Option("--file", "-f", help="The manifest with the MooncakeCluster.")],
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Where clients reach it.",
            show_default="8000, or the next free one",
        ),
    ] = None,
    secrets: Annotated[
        Path | None, typer.Option(help="Folder with Secrets: NAME/KEY files, or Secret manifests.")
    ] = None,
    no_table: Annotated[
        bool, typer.Option("--no-table", help="Print events instead of a live table.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print addresses as JSON when ready; implies --no-table.")
    ] = False,
) -> None:
    """Run a cluster on this machine, its Pods as processes.

    Ctrl-C drains and stops it; a second Ctrl-C stops it at once.
    """
    table = not (no_table or as_json) and err.is_terminal
    asyncio.run(_up(read(file), port, secrets, table=table, as_json=as_json))


def read(file: Path) -> Definition:
    """Read a manifest; its problems become the command's error."""
    from mooncake_core.api import ManifestError
    from mooncakectl.local.cluster import read_definition

    try:
        return read_definition(file)
    except ManifestError as error:
        raise CommandError(str(error)) from error


async def _up(
    definition: Definition, port: int | None, secrets: Path | None, *, table: bool, as_json: bool
) -> None:
    from mooncakectl.interrupts import Interrupts
    from mooncakectl.local import LocalRuntimeError
    from mooncakectl.session import first_of, started

    try:
        async with started(definition, port=port, secrets_dir=secrets, on_event=print_event) as session:
            with Interrupts(session.runtime.kill) as interrupts:
                asked = asyncio.create_task(_wait(interrupts.asked))
                await first_of(asked, asyncio.create_task(_serve(session, table=table, as_json=as_json)))
                say("draining: work in flight may end; Ctrl-C again stops at once")
                await session.drain_and_stop()
                say("stopped")
    except LocalRuntimeError as error:
        raise CommandError(str(error)) from error


async def _serve(session: Session, *, table: bool, as_json: bool) -> None:
    """Tell when the cluster is ready, then show it until cancelled."""
    from mooncakectl.status.live import show_live

    if table:
        await show_live(session, when_ready=lambda: _print_welcome(session))
        return
    await wait_ready(session)
    if as_json:
        print_json(_addresses(session))
    else:
        _print_welcome(session)
    await asyncio.Event().wait()


async def wait_ready(session: Session) -> None:
    """Wait until every Pod is ready; says so when it takes long, and goes on."""
    from mooncakectl.local import LocalRuntimeError

    while True:
        try:
            await session.runtime.wait_ready(_SLOW_START_S)
        except LocalRuntimeError as error:
            say(f"still starting: {error}")
        else:
            return


def _addresses(session: Session) -> dict[str, object]:
    cluster = session.cluster
    return {
        "cluster": cluster.definition.name,
        "model": cluster.definition.model,
        "endpoint": cluster.endpoint,
        "admin": list(cluster.admin_urls),
        "logs": str(session.runtime.folders.logs),
    }


def _print_welcome(session: Session) -> None:
    cluster = session.cluster
    body = json.dumps({"model": cluster.definition.model, "prompt": "Hello", "max_tokens": 16})
    key = "-H 'authorization: Bearer YOUR_KEY' " if cluster.definition.wants_key else ""
    out.print(Text.assemble(("ready", "bold green"), f" {cluster.endpoint}/v1"))
    lines = [
        "try:",
        f"  curl -i {cluster.endpoint}/v1/completions {key}-H 'content-type: application/json' -d '{body}'",
        "  mooncakectl status        who is there, and how loaded",
        "  mooncakectl explain ID    why a request went where it went (ID = x-request-id of its answer)",
        f"logs: {session.runtime.folders.logs}",
    ]
    out.print("\n".join(lines), highlight=False, soft_wrap=True)


def print_event(pod: str, container: str, line: str) -> None:
    """Tell on stderr what happened to a container."""
    err.print(f"{pod}/{container}: {line}", highlight=False, soft_wrap=True, style="dim")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
