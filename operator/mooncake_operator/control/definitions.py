"""Whether the kinds of mooncake.io have the fields that this operator writes: definitions come before it.

An operator newer than its CustomResourceDefinitions would fail at every status that it writes. What the API
server knows is read from its OpenAPI document, which everybody who is authenticated may read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from mooncake_core.api import API_VERSION, KINDS
from mooncake_core.api.crds import definition
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import InvalidError, KubeError, NotFoundError
from mooncake_operator.kube.resources import BY_KIND, POOLS

_log = structlog.get_logger()
Schema = Mapping[str, Any]

_PATIENCE_S = 20.0
"""How long definitions that have just been applied take at most until the API server tells of them."""
_AGAIN_S = 1.0
_NAMED = 5
_SELECTOR = "spec.clusterRef.name"
REMEDY = (
    "apply the definitions of this version before its operator:"
    " kubectl apply --server-side --force-conflicts -f crds/ (the chart does with crds.install=true)"
)


class OldDefinitionsError(Exception):
    """The CustomResourceDefinitions are those of an earlier version; names what they lack, and the remedy."""


async def require_current_definitions(
    client: Client, *, namespace: str = "default", patience_s: float = _PATIENCE_S
) -> None:
    """Return once the API server knows all fields of this version.

    Kinds that are not there at all are no hindrance: they may come later, and are looked for all the time.

    Args:
        client: the API server.
        namespace: one in which pools may be listed; it need not be there.
        patience_s: seconds to wait for them.

    Raises:
        OldDefinitionsError: it does not, and `patience_s` is over.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + patience_s
    while True:
        try:
            lacking = await lacks(client, namespace)
        except KubeError as error:
            _log.warning("it could not be seen whether the definitions are current", error=str(error))
            return
        if not lacking:
            return
        if clock() >= end_s:
            raise OldDefinitionsError(f"{'; '.join(lacking)}; {REMEDY}")
        await asyncio.sleep(_AGAIN_S)


async def lacks(client: Client, namespace: str) -> list[str]:
    """What the definitions on the API server lack, one line for each kind; nothing = they are current.

    Raises:
        KubeError: they cannot be read.
    """
    try:
        document = await client.openapi(API_VERSION)
    except NotFoundError:
        return []
    live = {kind: schema for schema in _schemas(document) for kind in _kinds(schema)}
    found = []
    for kind in KINDS:
        (version,) = definition(kind)["spec"]["versions"]
        missing = [*missing_fields(version["schema"]["openAPIV3Schema"], live[kind])] if kind in live else []
        if missing:
            named = ", ".join(missing[:_NAMED])
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            found.append(f"{BY_KIND[kind].plural}.mooncake.io lacks {named}{more}")
    return found + await _not_selectable(client, namespace, live)


async def _not_selectable(client: Client, namespace: str, live: Mapping[str, Schema]) -> list[str]:
    """Pools that cannot be asked for by their cluster, which no schema tells."""
    found = []
    for pool in POOLS:
        if pool.kind in live:
            try:
                # No name of a cluster begins so.
                await client.list_all(pool, namespace, fields={_SELECTOR: "-"})
            except InvalidError:
                found.append(f"{pool.plural}.mooncake.io cannot be selected by {_SELECTOR}")
    return found


def missing_fields(wanted: Schema, live: Schema, path: str = "") -> Iterator[str]:
    """Fields that one schema has and another lacks, as paths; lists are gone through."""
    if "items" in wanted:
        yield from missing_fields(wanted["items"], live.get("items") or {}, f"{path}[]")
        return
    if live.get("x-kubernetes-preserve-unknown-fields"):
        return
    known = live.get("properties") or {}
    for name, schema in (wanted.get("properties") or {}).items():
        below = f"{path}.{name}" if path else name
        if name not in known:
            yield below
        elif below not in ("metadata", "apiVersion", "kind"):
            yield from missing_fields(schema, known[name], below)
    inner, live_inner = wanted.get("additionalProperties"), live.get("additionalProperties")
    if isinstance(inner, Mapping) and isinstance(live_inner, Mapping):
        yield from missing_fields(inner, live_inner, f"{path}.*")


def _schemas(document: Mapping[str, Any]) -> Iterator[Schema]:
    yield from ((document.get("components") or {}).get("schemas") or {}).values()


def _kinds(schema: Schema) -> Iterator[str]:
    for kind in schema.get("x-kubernetes-group-version-kind") or ():
        if f"{kind.get('group')}/{kind.get('version')}" == API_VERSION:
            yield str(kind["kind"])
