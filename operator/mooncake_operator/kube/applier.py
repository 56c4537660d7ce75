"""Server-side apply that writes only where something would change, and never over a foreign object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError, PreconditionError
from mooncake_operator.kube.resources import (
    Object,
    controller_uid,
    is_terminating,
    name_of,
    resource_of,
    uid_of,
)

MANAGER = "mooncake-operator"


class NameTakenError(Exception):
    """An object of this name exists and belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What was last applied to one object, and which fields that made ours."""

    desired: bytes
    owned: bytes


class Applier:
    """Applies objects that one owner controls.

    An object is left alone when the same configuration was applied to it before and all fields which that
    made ours still are: whoever changes such a field takes it from us. That knowledge is a mere saving, lost
    on a restart; then each object is applied once, which changes nothing on the server.
    """

    def __init__(self, client: Client, *, on_drift: Callable[[Object], None] = lambda live: None) -> None:
        """Take the client; `on_drift` is told of objects whose fields another had taken."""
        self._client = client
        self._on_drift = on_drift
        self._written: dict[str, _Written] = {}

    async def ensure(
        self, desired: Object, live: Object | None, owner_uid: str, *, force: bool = False
    ) -> Object:
        """Bring an object to what is desired; returns it as it then is.

        Args:
            desired: with its owner reference.
            live: the object as last listed; None = not among those listed, which is looked into.
            owner_uid: uid of the only owner whose objects are touched.
            force: take fields from other managers instead of giving up.

        Raises:
            NameTakenError: an object of this name has another owner, or none.
            FieldConflictError: another manager holds a field with another value.
        """
        if live is None:
            live = await self._find(desired)
        if live is None:
            return self._remember(desired, await self._apply(desired, force=force))
        if controller_uid(live) != owner_uid:
            remedy = "it is being deleted" if is_terminating(live) else "delete or rename it"
            raise NameTakenError(f"{live['kind']} {name_of(live)} exists and is not this cluster's; {remedy}")
        written = self._written.get(uid_of(live))
        if written == _Written(_digest(desired), _owned(live)):
            return live
        if written is not None and written.desired == _digest(desired):
            self._on_drift(live)
        # With the uid, an object that took the name meanwhile is not written to.
        meant = {**desired, "metadata": {**desired["metadata"], "uid": uid_of(live)}}
        return self._remember(desired, await self._apply(meant, force=force))

    async def remove(self, live: Object, owner_uid: str) -> bool:
        """Delete an object that is no longer wanted; returns whether it was there, and ours."""
        if controller_uid(live) != owner_uid:
            return False
        self._written.pop(uid_of(live), None)
        namespace = live["metadata"].get("namespace")
        try:
            await self._client.delete(resource_of(live), namespace, name_of(live), uid=uid_of(live))
        except (NotFoundError, PreconditionError):
            return False
        return True

    def forget_all_but(self, uids: set[str]) -> None:
        """Drop what is known of objects that are gone."""
        self._written = {uid: written for uid, written in self._written.items() if uid in uids}

    async def _find(self, desired: Object) -> Object | None:
        try:
            namespace = desired["metadata"].get("namespace")
            return await self._client.get(resource_of(desired), namespace, name_of(desired))
        except NotFoundError:
            return None

    async def _apply(self, desired: Object, *, force: bool) -> Object:
        return await self._client.apply(desired, manager=MANAGER, force=force)

    def _remember(self, desired: Object, live: Object) -> Object:
        self._written[uid_of(live)] = _Written(_digest(desired), _owned(live))
        return live


def _digest(value: Any) -> bytes:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).digest()


def _owned(live: Mapping[str, Any]) -> bytes:
    """Digest of the fields that our applies own."""
    for entry in live["metadata"].get("managedFields", ()):
        if (
            entry.get("manager") == MANAGER
            and entry.get("operation") == "Apply"
            and not entry.get("subresource")
        ):
            return _digest(entry.get("fieldsV1"))
    return b""
