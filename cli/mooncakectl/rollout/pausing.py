"""Holding a rollout where it is, and letting it go on: `update.paused` of pools."""

from __future__ import annotations

from mooncake_operator.kube.resources import (
    CLUSTER,
    KV_CACHE_POOL,
    Object,
    controller_uid,
    name_of,
    resource_of,
    uid_of,
)
from mooncakectl.console import CommandError
from mooncakectl.rollout.target import Target

_ENTRIES = ("prefillPools", "decodePools")


async def set_paused(target: Target, paused: bool) -> list[str]:
    """Pause or resume all prefill and decode pools of a cluster, or one pool; returns those that changed.

    Raises:
        CommandError: a store, which has no rollout to hold, or a pool that its cluster decides on.
    """
    target.must_be_its_own("pause" if paused else "resume")
    if target.resource is KV_CACHE_POOL:
        raise CommandError("stores are replaced node by node and cannot be paused; name a cluster or a pool")
    if target.resource is not CLUSTER:
        return [name_of(target.live)] if await _set_pool(target, paused) else []
    changed = [
        f"{name_of(target.live)}-{entry['name']}"
        for field in _ENTRIES
        for entry in target.live["spec"].get(field) or ()
        if _is_paused(entry) is not paused
    ]
    if changed:
        await target.change(lambda spec: _with_entries(spec, paused))
    for pool in await target.pools():
        resource = resource_of(pool)
        if resource is KV_CACHE_POOL or controller_uid(pool) == uid_of(target.live):
            continue
        if await _set_pool(Target(target.client, target.namespace, resource, pool), paused):
            changed.append(name_of(pool))
    return changed


async def _set_pool(target: Target, paused: bool) -> bool:
    if _is_paused(target.live["spec"]) is paused:
        return False
    await target.change(lambda spec: _with_paused(spec, paused))
    return True


def _is_paused(pool: Object) -> bool:
    return bool((pool.get("update") or {}).get("paused", False))


def _with_paused(pool: Object, paused: bool) -> Object:
    return {**pool, "update": {**(pool.get("update") or {}), "paused": paused}}


def _with_entries(spec: Object, paused: bool) -> Object:
    changed = {
        field: [_with_paused(entry, paused) for entry in spec[field]] for field in _ENTRIES if spec.get(field)
    }
    return {**spec, **changed}
