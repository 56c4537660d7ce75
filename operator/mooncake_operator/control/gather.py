"""Reads one cluster's world from the API server: what planning rests on, and what has changed of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_operator.control.contract import Key
from mooncake_operator.control.recent import Recent
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import (
    CLUSTER,
    CONTROLLER_REVISION,
    KV_CACHE_POOL,
    NAMESPACE,
    OWNED,
    POD,
    POOLS,
    Object,
    Resource,
    is_terminating,
    name_of,
    uid_of,
)

CLUSTER_LABEL = "mooncake.io/cluster"
CLUSTER_FIELD = "spec.clusterRef.name"
MANAGED = {"app.kubernetes.io/managed-by": "mooncake-operator"}
STRANGERS = "strangers"
"""Pods that are none of the product's, as `Recent` knows them: no watch tells of them."""
_PLAIN = tuple(kind for kind in OWNED if kind is not CONTROLLER_REVISION)
"""Of these a pass needs to know only whether they still are as it left them."""
_PLAIN_S = 60.0
_STRANGERS_S = 10.0


@dataclass(frozen=True, slots=True)
class World:
    """What there is, as plain objects."""

    cluster: Object | None
    pools: tuple[Object, ...] = ()
    """Those that refer to the cluster, whoever wrote them."""
    pods: tuple[Object, ...] = ()
    """The cluster's, and of Pods that are none of the product's their metadata: they may have a name that is
    wanted. (Should one of another cluster have it, its creation is refused.)"""
    owned: Mapping[tuple[str, str], Object] | None = None
    """All else that bears the cluster's label, by kind and name."""
    namespace_terminating: bool = False

    def find(self, kind: str, name: str) -> Object | None:
        """An object of the cluster."""
        return (self.owned or {}).get((kind, name))


async def gather(client: Client, key: Key, recent: Recent | None = None) -> World:
    """Read the world of one cluster.

    Args:
        client: the API server.
        key: the cluster.
        recent: what need not be read again; left out = everything is.

    Raises:
        KubeError: the API server does not answer, or does not allow it.
    """
    labels, known = {CLUSTER_LABEL: key.name}, recent or Recent(trusted=False)

    async def strangers() -> list[Object]:
        return await list_known(client, POD, key.namespace, without=MANAGED, metadata_only=True)

    async def plain(kind: Resource) -> Sequence[Object]:
        return await known.get(
            kind, lambda: list_known(client, kind, key.namespace, labels=labels), for_s=_PLAIN_S
        )

    async def pools(kind: Resource) -> Sequence[Object]:
        return await list_known(client, kind, key.namespace, fields={CLUSTER_FIELD: key.name})

    try:
        async with asyncio.TaskGroup() as group:
            cluster = group.create_task(_cluster(client, key))
            own = [group.create_task(pools(kind)) for kind in POOLS if kind is not KV_CACHE_POOL]
            own.append(group.create_task(_stores(known, pools)))
            pods = group.create_task(list_known(client, POD, key.namespace, labels=labels))
            others = group.create_task(known.get(STRANGERS, strangers, for_s=_STRANGERS_S))
            owned = [group.create_task(plain(kind)) for kind in _PLAIN]
            revisions = list_known(client, CONTROLLER_REVISION, key.namespace, labels=labels)
            owned.append(group.create_task(revisions))
    except ExceptionGroup as errors:
        # One is enough to know why there is no picture, and keeps its type.
        raise errors.exceptions[0] from None
    own_pools = tuple(pool for task in own for pool in task.result())
    found = cluster.result()
    # Only a deletion makes it worth asking: namespaces are deleted by deleting what is in them.
    ends = any(is_terminating(obj) for obj in (*own_pools, *([found] if found else [])))
    return World(
        cluster=found,
        pools=own_pools,
        pods=_once_each(pods.result(), others.result()),
        owned={(obj["kind"], name_of(obj)): obj for task in owned for obj in task.result()},
        namespace_terminating=ends and await namespace_ends(client, key.namespace),
    )


async def _stores(
    recent: Recent, read: Callable[[Resource], Awaitable[Sequence[Object]]]
) -> Sequence[Object]:
    """KV cache pools. That there are none may be from a moment ago; a status is planned on, and read anew."""
    found = await recent.get(KV_CACHE_POOL, lambda: read(KV_CACHE_POOL), for_s=_PLAIN_S)
    if found:
        recent.changed(KV_CACHE_POOL)
    return found


async def _cluster(client: Client, key: Key) -> Object | None:
    try:
        return await client.get(CLUSTER, key.namespace, key.name)
    except NotFoundError:
        return None


async def list_known(
    client: Client,
    resource: Resource,
    namespace: str | None,
    *,
    labels: Mapping[str, str] | None = None,
    without: Mapping[str, str] | None = None,
    fields: Mapping[str, str] | None = None,
    metadata_only: bool = False,
) -> list[Object]:
    """All objects of a kind; none where its CustomResourceDefinition is not there, or no longer.

    Raises:
        KubeError: the API server does not answer, or does not allow it.
    """
    try:
        return await client.list_all(
            resource, namespace, labels=labels, without=without, fields=fields, metadata_only=metadata_only
        )
    except NotFoundError:
        return []


def _once_each(pods: Sequence[Object], strangers: Sequence[Object]) -> tuple[Object, ...]:
    """All Pods; of one that bears the cluster's label and is nobody's, what is known in full."""
    known = {uid_of(pod) for pod in pods}
    return (*pods, *(pod for pod in strangers if uid_of(pod) not in known))


async def namespace_ends(client: Client, namespace: str) -> bool:
    """Whether a namespace is being deleted, or is gone."""
    try:
        return is_terminating(await client.get(NAMESPACE, None, namespace))
    except NotFoundError:
        return True
