"""`mooncakectl status`: who is there, and how loaded."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from mooncakectl.console import out, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status)


def status(
    url: Annotated[
        str | None, typer.Option(help="The scheduler's admin port; else the local cluster's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scheduler's answers as JSON.")] = False,
) -> None:
    """Show a cluster's instances, their load, latencies against the SLO, and what was refused."""
    from mooncakectl.status.snapshot import snapshot_of
    from mooncakectl.status.tables import snapshot_tables

    answers = asyncio.run(_ask(url))
    if as_json:
        print_json(answers)
    else:
        out.print(snapshot_tables(snapshot_of(answers["instances"], answers["stats"])))


async def _ask(url: str | None) -> dict[str, Any]:
    from mooncakectl.admin import AdminClient, admin_url

    async with AdminClient(admin_url(url)) as admin:
        return {"instances": await admin.instances(), "stats": await admin.stats()}
