"""The live table of `mooncakectl up`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.live import Live

from mooncakectl.admin import AdminClient
from mooncakectl.console import err
from mooncakectl.session import Session
from mooncakectl.status.ask import ask_snapshot
from mooncakectl.status.snapshot import Snapshot
from mooncakectl.status.tables import snapshot_tables

_REFRESH_S = 1.0


async def show_live(session: Session, *, when_ready: Callable[[], None]) -> None:
    """Show the cluster until cancelled; calls `when_ready` once, when every Pod is."""
    told = False
    async with AdminClient(session.cluster.admin_urls[0], timeout_s=_REFRESH_S) as admin:
        with Live(console=err, auto_refresh=False, transient=True) as live:
            while True:
                pods = session.runtime.statuses()
                if not told and all(pod.ready for pod in pods):
                    told = True
                    when_ready()
                # While the cluster starts its scheduler need not answer, and nobody is to be alarmed.
                snapshot = await ask_snapshot(admin) if told else Snapshot()
                live.update(snapshot_tables(snapshot, pods), refresh=True)
                await asyncio.sleep(_REFRESH_S)
