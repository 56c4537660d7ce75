"""Inline entries of a cluster and the pool objects that they become: who says how many instances there are.

Two field managers share a pool object. `mooncake-operator` has all of its spec but the replicas.
`mooncake-inline` has `declaredReplicas` and `replicas`, and writes both only when the inline number differs
from the live `declaredReplicas`, that is when the cluster's author has changed it. In between `/scale` may
say what it likes, to whatever value, by whatever manager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake_core.api import EnginePoolEntry, KVCachePoolEntry, MooncakeCluster
from mooncake_core.api.base import ApiModel
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.resources import Object, name_of, uid_of

INLINE_MANAGER = "mooncake-inline"
_REPLICA_FIELDS = ("replicas", "declaredReplicas")


def without_replicas(pool: Object) -> Object:
    """What `mooncake-operator` applies of a pool."""
    spec = {field: value for field, value in pool["spec"].items() if field not in _REPLICA_FIELDS}
    return {**pool, "spec": spec}


async def declare_replicas(client: Client, desired: Object, live: Object) -> Object:
    """Take the inline number over if it is news; returns the pool as it then is.

    Args:
        client: the API server.
        desired: the pool as the inline entry describes it.
        live: the pool as it is.
    """
    number = desired["spec"]["replicas"]
    if live["spec"].get("declaredReplicas") == number:
        return live
    body = {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": {
            "name": name_of(live),
            "namespace": live["metadata"]["namespace"],
            "uid": uid_of(live),
        },
        "spec": {"declaredReplicas": number, "replicas": number},
    }
    return await client.apply(body, manager=INLINE_MANAGER, force=True)


def with_live_replicas(cluster: MooncakeCluster, pools: Mapping[str, Object]) -> MooncakeCluster:
    """The cluster with the instances that its pools really have, by pool name.

    Not checked again: the numbers of `/scale` may break bounds that the inline numbers keep.
    """
    prefix = cluster.metadata.name

    def entries(given: Sequence[EnginePoolEntry | KVCachePoolEntry]) -> list[ApiModel]:
        changed: list[ApiModel] = []
        for entry in given:
            live = pools.get(f"{prefix}-{entry.name}")
            number = live["spec"].get("replicas", 1) if live is not None else entry.replicas
            changed.append(entry.model_copy(update={"replicas": number}))
        return changed

    spec = cluster.spec
    changed = {
        field: entries(getattr(spec, field)) for field in ("prefill_pools", "decode_pools", "kv_cache_pools")
    }
    return cluster.model_copy(update={"spec": spec.model_copy(update=changed)})
