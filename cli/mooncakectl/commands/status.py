"""`mooncakectl status`: who is there, and how loaded."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mooncakectl.console import CommandError, out, print_json

if TYPE_CHECKING:
    from mooncakectl.status.snapshot import Answers


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
    if not answers.instances:
        raise CommandError(answers.problems[0])
    if as_json:
        listed = answers.instances[0].get("instances", [])
        stores = [asdict(store) for store in answers.stores]
        print_json(
            {"instances": listed, "schedulers": answers.stats, "stores": stores, "problems": answers.problems}
        )
    else:
        out.print(snapshot_tables(snapshot_of(answers)))


async def _ask(url: str | None) -> Answers:
    from mooncakectl.admin import admin_urls, connected
    from mooncakectl.status.ask import ask_all

    async with connected(admin_urls(url)) as admins:
        return await ask_all(admins)
