"""`mooncakectl explain`: why a request went where it went."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from mooncakectl.console import out, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    request_id: Annotated[str, typer.Argument(help="The x-request-id of its answer.")],
    url: Annotated[
        str | None, typer.Option(help="The scheduler's admin port; else the local cluster's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scheduler's answer as JSON.")] = False,
) -> None:
    """Show a decision: who was considered, what was predicted, and what came of it."""
    from mooncakectl.status.decision import decision_view

    decision = asyncio.run(_ask(request_id, url))
    if as_json:
        print_json(decision)
    else:
        out.print(decision_view(decision))


async def _ask(request_id: str, url: str | None) -> Any:
    from mooncakectl.admin import admin_urls, connected
    from mooncakectl.admin.client import AdminError, UnknownError, UnreachableError

    failed: AdminError | None = None
    # Each scheduler remembers its own decisions.
    async with connected(admin_urls(url)) as admins:
        for admin in admins:
            try:
                return await admin.decision(request_id)
            except UnreachableError as error:
                failed = failed or error
            except UnknownError as error:
                failed = error
    assert failed is not None, "there is always a port to ask"
    raise failed
