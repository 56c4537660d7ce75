"""Pools written on their own: which of them a cluster can use, and what the others are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake_core.api import MooncakeCluster, Pool
from mooncake_operator.control.reading import read_pool
from mooncake_operator.control.reports import kept_status
from mooncake_operator.control.status import StatusWriter, condition
from mooncake_operator.kube.resources import (
    KV_CACHE_POOL,
    Object,
    controller_uid,
    is_terminating,
    name_of,
    uid_of,
)
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.manifests.plan import inline_pools, objection


def by_right(pools: Iterable[Object], cluster: Object | None) -> list[Object]:
    """All pools, those first that have a right to their name: names are unique over the kinds.

    Args:
        pools: live objects that refer to the cluster.
        cluster: the live cluster, whose own pools come before those of others.
    """
    return sorted(
        pools,
        key=lambda pool: (
            not is_own(pool, cluster),
            pool["metadata"].get("creationTimestamp", ""),
            pool["kind"],
        ),
    )


def is_own(pool: Object, cluster: Object | None) -> bool:
    """Whether a pool was made from an inline entry."""
    return cluster is not None and controller_uid(pool) == uid_of(cluster)


class StandalonePools:
    """Of one cluster, in one pass."""

    def __init__(
        self,
        status: StatusWriter,
        pools: Iterable[Object],
        cluster: Object | None,
        pods: Iterable[Object],
    ) -> None:
        """Take all pools that refer to the live cluster, and the Pods that are there."""
        self._status = status
        self._with_pods = {controller_uid(pod) for pod in pods}
        self._all = by_right(pools, cluster)
        self._cluster = cluster
        self.live: dict[str, Object] = {}
        """Pools by name, its own included; of two with one name the one that has a right to it."""
        self.findings: list[Finding] = []
        """Why some cannot be used."""
        for pool in self._all:
            self.live.setdefault(name_of(pool), pool)

    async def usable(self, cluster: MooncakeCluster) -> list[Pool] | None:
        """Those that can be planned with; the others are told why not.

        None = nothing may be planned, for one of the others is a store in use: to plan without it would
        replace all engines, and take its master from those that still run.
        """
        inline = inline_pools(cluster)
        names = {pool.metadata.name for pool in inline}
        found: list[Pool] = []
        lost = False
        for pool in sorted(self._all, key=lambda pool: not self._is_store_in_use(pool)):
            if is_own(pool, self._cluster) or is_terminating(pool):
                continue
            read = self._clash(pool, names) or _usable(pool, cluster, [*inline, *found])
            if isinstance(read, Finding):
                await self._refuse(pool, read)
                lost = lost or self._is_store_in_use(pool)
            else:
                found.append(read)
        return None if lost else found

    def _is_store_in_use(self, pool: Object) -> bool:
        """Whether engines may have been told of it: it has Pods, or was planned and has lost them."""
        if pool["kind"] != KV_CACHE_POOL.kind:
            return False
        return uid_of(pool) in self._with_pods or bool((pool.get("status") or {}).get("currentRevision"))

    def _clash(self, pool: Object, inline: set[str]) -> Finding | None:
        name = name_of(pool)
        if name in inline:
            message = f"{pool['kind']} {name} has the name of one of the cluster's own pools; rename it"
            return Finding(reasons.POOL_NAME_TAKEN, message)
        other = self.live.get(name, pool)
        if other["kind"] == pool["kind"]:
            return None
        message = f"{other['kind']} {name} has the same name and was there before; rename one of them"
        return Finding(reasons.POOL_NAME_TAKEN, message)

    async def _refuse(self, pool: Object, why: Finding) -> None:
        name = name_of(pool)
        self.findings.append(Finding(why.reason, f"{pool['kind']} {name}: {why.message}"))
        unusable = condition("Available", False, why.reason, why.message)
        written = await self._status.write(pool, kept_status(pool), [unusable])
        if name not in self.live or uid_of(self.live[name]) != uid_of(pool):
            return
        if why.reason == reasons.POOL_NAME_TAKEN:
            # It must not lend its uid to the pool whose name it has.
            del self.live[name]
        else:
            self.live[name] = written


def _usable(pool: Object, cluster: MooncakeCluster, others: Sequence[Pool]) -> Pool | Finding:
    """The pool, or why the cluster cannot have it: what others wrote keeps nothing else from working."""
    read = read_pool(pool)
    if isinstance(read, Finding):
        return read
    return objection(cluster, read, beside=others) or read
