"""`python -m mooncake_operator.leave`: what `helm uninstall` runs once the operator is gone.

Pools have a finalizer, for what runs is drained before they end. With no operator left to take it off,
whoever deletes a cluster, or its namespace, would wait for ever. Nothing else is touched: what runs goes on,
and the next operator puts the finalizers back.
"""

from __future__ import annotations

import asyncio
import sys

import structlog

from mooncake_core.standard_streams import lose_what_cannot_be_written
from mooncake_operator.control.finalizers import free_pools
from mooncake_operator.control.leadership import Leadership, LeaseTerms
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.configuration import NoClusterError, find_configuration
from mooncake_operator.kube.errors import KubeError, NotFoundError, PreconditionError
from mooncake_operator.kube.resources import LEASE, uid_of
from mooncake_operator.logs import set_up_logging
from mooncake_operator.settings import Settings, SettingsError

_log = structlog.get_logger()


async def leave(client: Client, settings: Settings) -> int:
    """Take the operator's Lease, then its finalizers off all pools, then the Lease away.

    Args:
        client: the API server.
        settings: the operator's own: which Lease, which namespaces.

    Returns:
        How many pools had the finalizer.

    Raises:
        KubeError: the API server does not answer, or refuses.
    """
    if settings.lease:
        await _outlast(client, settings)
    freed = 0
    for namespace in settings.namespaces or (None,):
        freed += await free_pools(client, namespace)
    if settings.lease:
        await _forget(client, settings)
    return freed


async def _outlast(client: Client, settings: Settings) -> None:
    """Wait until no operator acts: one that still runs would put the finalizers back."""
    namespace, name = settings.own_namespace(), settings.lease_name
    try:
        await client.get(LEASE, namespace, name)
    except NotFoundError:
        return
    duration_s = settings.lease_duration_seconds
    terms = LeaseTerms(
        namespace,
        name,
        settings.own_identity(),
        duration_s=duration_s,
        renew_deadline_s=duration_s * 2 / 3,
        retry_s=duration_s * 2 / 15,
    )
    await Leadership(client, terms).acquire()


async def _forget(client: Client, settings: Settings) -> None:
    namespace, name = settings.own_namespace(), settings.lease_name
    try:
        lease = await client.get(LEASE, namespace, name)
        await client.delete(LEASE, namespace, name, uid=uid_of(lease))
    except (NotFoundError, PreconditionError):
        return


async def _run(settings: Settings) -> int:
    async with Client(await find_configuration()) as client:
        return await leave(client, settings)


def main() -> int:
    """Leave; returns the exit code."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        print(f"mooncake-operator: {error}", file=sys.stderr)
        return 2
    set_up_logging(settings.log_level)
    try:
        freed = asyncio.run(_run(settings))
    except (NoClusterError, KubeError) as error:
        _log.error("the operator could not leave", why=str(error), error=type(error).__name__)
        return 1
    _log.info("the operator has left", pools=freed)
    return 0


if __name__ == "__main__":
    lose_what_cannot_be_written()
    sys.exit(main())
