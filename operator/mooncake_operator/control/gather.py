"""Reads one cluster's world from the API server; everything anew on each pass."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_operator.control.contract import Key
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import (
    CLUSTER,
    NAMESPACE,
    OWNED,
    POD,
    POOLS,
    Object,
    Resource,
    is_terminating,
    name_of,
)

CLUSTER_LABEL = "mooncake.io/cluster"


@dataclass(frozen=True, slots=True)
class World:
    """What there is, as plain objects."""

    cluster: Object | None
    pools: tuple[Object, ...] = ()
    """Those that refer to the cluster, whoever wrote them."""
    pods: tuple[Object, ...] = ()
    """All Pods of the namespace."""
    owned: Mapping[tuple[str, str], Object] | None = None
    """All else that bears the cluster's label, by kind and name."""
    namespace_terminating: bool = False

    def find(self, kind: str, name: str) -> Object | None:
        """An object of the cluster."""
        return (self.owned or {}).get((kind, name))


async def gather(client: Client, key: Key) -> World:
    """Read the world of one cluster.

    Raises:
        KubeError: the API server does not answer, or does not allow it.
    """
    labels = {CLUSTER_LABEL: key.name}
    try:
        async with asyncio.TaskGroup() as group:
            cluster = group.create_task(_cluster(client, key))
            pools = [group.create_task(list_known(client, pool, key.namespace)) for pool in POOLS]
            # All of them, for a foreign Pod may have a name that is wanted.
            pods = group.create_task(list_known(client, POD, key.namespace))
            owned = [group.create_task(list_known(client, kind, key.namespace, labels)) for kind in OWNED]
    except ExceptionGroup as errors:
        # One is enough to know why there is no picture, and keeps its type.
        raise errors.exceptions[0] from None
    own_pools = tuple(
        pool
        for task in pools
        for pool in task.result()
        if pool.get("spec", {}).get("clusterRef", {}).get("name") == key.name
    )
    found = cluster.result()
    # Only a deletion makes it worth asking: namespaces are deleted by deleting what is in them.
    ends = any(is_terminating(obj) for obj in (*own_pools, *([found] if found else [])))
    return World(
        cluster=found,
        pools=own_pools,
        pods=tuple(pods.result()),
        owned={(obj["kind"], name_of(obj)): obj for task in owned for obj in task.result()},
        namespace_terminating=ends and await _namespace_ends(client, key.namespace),
    )


async def _cluster(client: Client, key: Key) -> Object | None:
    try:
        return await client.get(CLUSTER, key.namespace, key.name)
    except NotFoundError:
        return None


async def list_known(
    client: Client, resource: Resource, namespace: str | None, labels: Mapping[str, str] | None = None
) -> list[Object]:
    """All objects of a kind; none where its CustomResourceDefinition is not there, or no longer.

    Raises:
        KubeError: the API server does not answer, or does not allow it.
    """
    try:
        return await client.list_all(resource, namespace, labels=labels)
    except NotFoundError:
        return []


async def _namespace_ends(client: Client, namespace: str) -> bool:
    try:
        return is_terminating(await client.get(NAMESPACE, None, namespace))
    except NotFoundError:
        return True
