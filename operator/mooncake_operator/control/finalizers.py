"""Takes the operator's finalizers off pools where no drain is to be waited for any more."""

from __future__ import annotations

import structlog

from mooncake_operator.control.gather import namespace_ends
from mooncake_operator.control.picture import FINALIZER
from mooncake_operator.kube.applier import MANAGER
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError, PreconditionError
from mooncake_operator.kube.resources import DECODE_POOL, PREFILL_POOL, Object, Resource, name_of

_log = structlog.get_logger()
_TRIES = 5


async def free_pools(client: Client, namespace: str | None) -> int:
    """Take them off all pools of a namespace, or of all; returns how many had one.

    Raises:
        KubeError: the API server does not answer, or refuses.
    """
    freed = 0
    for resource in (PREFILL_POOL, DECODE_POOL):
        for pool in await _listed(client, resource, namespace):
            freed += await _free(client, resource, pool)
    return freed


async def freed_because_the_namespace_ends(client: Client, namespace: str) -> bool:
    """Free the pools of a namespace that is being deleted; whether it is.

    For an operator whose rights in the namespace are deleted with it: its own finalizers are then what keeps
    the namespace, and all that it can still see to.

    Raises:
        KubeError: the API server does not answer, or refuses this too.
    """
    if not await namespace_ends(client, namespace):
        return False
    await free_pools(client, namespace)
    return True


async def _listed(client: Client, resource: Resource, namespace: str | None) -> list[Object]:
    try:
        return await client.list_all(resource, namespace)
    except NotFoundError:
        # Without its definition there are no such objects.
        return []


async def _free(client: Client, resource: Resource, pool: Object) -> bool:
    namespace, name = pool["metadata"]["namespace"], name_of(pool)
    for attempt in range(_TRIES):
        finalizers = pool["metadata"].get("finalizers") or []
        if FINALIZER not in finalizers:
            return False
        others = [item for item in finalizers if item != FINALIZER]
        # With the version, nobody else's finalizer is lost.
        version = pool["metadata"]["resourceVersion"]
        body = {"metadata": {"finalizers": others, "resourceVersion": version}}
        try:
            await client.patch(resource, namespace, name, body, how="merge", manager=MANAGER)
        except NotFoundError:
            return False
        except PreconditionError:
            if attempt == _TRIES - 1:
                raise
            pool = await client.get(resource, namespace, name)
        else:
            _log.info("finalizer taken off", kind=resource.kind, name=name, namespace=namespace)
            return True
    raise AssertionError("unreachable")
