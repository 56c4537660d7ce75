"""The live table of `mooncakectl up`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.live import Live

from mooncakectl.admin import connected
from mooncakectl.console import err
from mooncakectl.session import Session
from mooncakectl.status.ask import ask_all
from mooncakectl.status.snapshot import Snapshot, snapshot_of
from mooncakectl.status.tables import snapshot_tables

_REFRESH_S = 1.0


async def show_live(session: Session, *, when_ready: Callable[[], None]) -> None:
    """Show the cluster until cancelled; calls `when_ready` once, when every Pod is."""
    async with connected(session.cluster.admin_urls, timeout_s=_REFRESH_S) as admins:
        with _table() as table:
            # While the cluster starts its scheduler need not answer, and nobody is to be alarmed.
            while True:
                pods = session.runtime.statuses()
                if all(pod.ready for pod in pods):
                    break
                table.update(snapshot_tables(Snapshot(), pods), refresh=True)
                await asyncio.sleep(_REFRESH_S)
        # Between two tables: what is printed below one would be drawn over by the next.
        when_ready()
        with _table() as table:
            while True:
                snapshot = snapshot_of(await ask_all(admins))
                table.update(snapshot_tables(snapshot, session.runtime.statuses()), refresh=True)
                await asyncio.sleep(_REFRESH_S)


def _table() -> Live:
    return Live(console=err, auto_refresh=False, transient=True)
