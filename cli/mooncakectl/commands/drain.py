"""`mooncakectl drain`: no new work for an instance."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from mooncakectl.console import out, print_json, say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("drain")(drain)


def drain(
    instance: Annotated[str, typer.Argument(help="Its id: the Pod's name, as `status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    url: Annotated[
        str | None, typer.Option(help="The scheduler's admin port; else the local cluster's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Mark an instance draining: what it works on may end, nothing new is sent to it."""
    answer = asyncio.run(_drain(instance, undo, url))
    if as_json:
        print_json(answer)
    else:
        state = "takes work again" if undo else "is draining: it gets no new work"
        out.print(f"{instance} {state}", highlight=False)


async def _drain(instance: str, undo: bool, url: str | None) -> object:
    from mooncakectl.admin import admin_urls, connected
    from mooncakectl.admin.client import UnreachableError

    # Schedulers share the registry: telling one is telling all.
    async with connected(admin_urls(url)) as admins:
        for admin in admins[:-1]:
            try:
                return await admin.drain(instance, wanted=not undo)
            except UnreachableError as error:
                say(f"{error}; asking the next one")
        return await admins[-1].drain(instance, wanted=not undo)
