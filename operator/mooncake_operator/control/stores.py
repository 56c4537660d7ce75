"""How full a cluster's store is: its master knows.

Names of metrics: Mooncake 0.3.13, `master_metric_manager.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp
import structlog

from mooncake_operator.kube.resources import Object
from mooncake_operator.planning import ClusterNames, Port
from mooncake_operator.planning.capacity import StoreLevel

_log = structlog.get_logger()
_CAPACITY, _ALLOCATED = "master_total_capacity_bytes", "master_allocated_bytes"
_LARGEST_PAGE = 4 << 20


class Stores:
    """Asks stores' masters."""

    def __init__(self, *, port: int | None = None, timeout_s: float = 2.0) -> None:
        """Take the masters' HTTP port; None = the one that Pods in a cluster have."""
        self._port = port or ClusterNames().port("", Port.MASTER_HTTP)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def level(self, masters: Iterable[Object]) -> StoreLevel | None:
        """What the first master that answers says; None = none does.

        Args:
            masters: live Pods of a store's masters.
        """
        for pod in masters:
            address = (pod.get("status") or {}).get("podIP")
            if not address:
                continue
            host = f"[{address}]" if ":" in address else address
            try:
                text = await self._page(f"http://{host}:{self._port}/metrics")
            except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
                _log.debug("a store's master does not tell", address=address, error=str(error))
                continue
            if level := level_of(text):
                return level
        return None

    async def _page(self, url: str) -> str:
        async with aiohttp.ClientSession(timeout=self._timeout) as session, session.get(url) as answer:
            answer.raise_for_status()
            return (await answer.content.read(_LARGEST_PAGE)).decode()


def level_of(exposition: str) -> StoreLevel | None:
    """A store's level from its master's metrics; None = they do not say."""
    found: dict[str, int] = {}
    for line in exposition.splitlines():
        name, _, value = line.partition(" ")
        if name in (_CAPACITY, _ALLOCATED):
            try:
                found[name] = int(float(value))
            except (ValueError, OverflowError):
                return None
    return StoreLevel(found[_CAPACITY], found.get(_ALLOCATED, 0)) if _CAPACITY in found else None
