"""Asking a scheduler how the cluster fares."""

from __future__ import annotations

import asyncio

from mooncakectl.admin import AdminClient, AdminError
from mooncakectl.status.snapshot import Snapshot, snapshot_of


async def ask_snapshot(admin: AdminClient) -> Snapshot:
    """The cluster now; a scheduler that does not answer gives an empty one that says so."""
    try:
        instances, stats = await asyncio.gather(admin.instances(), admin.stats())
    except AdminError as error:
        return Snapshot(problem=str(error))
    return snapshot_of(instances, stats)
