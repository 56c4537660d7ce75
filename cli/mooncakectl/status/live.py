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
    told = False
    async with connected(session.cluster.admin_urls, timeout_s=_REFRESH_S) as admins:
        with Live(console=err, auto_refresh=False, transient=True) as live:
            while True:
                pods = session.runtime.statuses()
                if not told and all(pod.ready for pod in pods):
                    told = True
                    when_ready()
                # While the cluster starts its scheduler need not answer, and nobody is to be alarmed.
                snapshot = snapshot_of(await ask_all(admins)) if told else Snapshot()
                live.update(snapshot_tables(snapshot, pods), refresh=True)
                await asyncio.sleep(_REFRESH_S)
