"""Kubernetes Events: what users must notice, where `kubectl describe` shows it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import structlog

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import AlreadyExistsError, ForbiddenError, KubeError
from mooncake_operator.kube.resources import EVENT, Object, name_of, uid_of

_log = structlog.get_logger()
_CONTROLLER = "mooncake.io/operator"
_LONGEST_NOTE_BYTES = 1024
_REMEMBERED = 4096
_AT_ONCE = 25
_ONE_MORE_S = 300.0
"""As client-go's spam filter: so many Events of one object at once, then one more now and then."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class _Budget:
    """How many Events an object may still get."""

    __slots__ = ("_as_of", "_left")

    def __init__(self, now: datetime) -> None:
        self._left = float(_AT_ONCE)
        self._as_of = now

    def spend(self, now: datetime) -> bool:
        """Take one, if there is one."""
        gained = max(0.0, (now - self._as_of).total_seconds()) / _ONE_MORE_S
        self._left, self._as_of = min(float(_AT_ONCE), self._left + gained), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class EventRecorder:
    """Posts Events: the same of the same object at most once in `quiet_s`, and never too many of one object.

    An Event that cannot be posted is logged and forgotten: nothing may depend on it.
    """

    def __init__(
        self,
        client: Client,
        *,
        instance: str,
        quiet_s: float = 600.0,
        now: Callable[[], datetime] = _utc_now,
        observe: Callable[[str], None] = lambda result: None,
    ) -> None:
        """Take the client and this process's name; `observe` is told `posted`, `dropped` or `failed`."""
        self._client = client
        self._instance = instance
        self._quiet_s = quiet_s
        self._now = now
        self._observe = observe
        self._posted: OrderedDict[str, datetime] = OrderedDict()
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()

    async def record(
        self,
        about: Mapping[str, Any],
        reason: str,
        note: str,
        *,
        kind: Literal["Normal", "Warning"] = "Normal",
        action: str = "Reconcile",
    ) -> None:
        """Tell of something that has happened to an object."""
        note = _cut(note)
        now = self._now()
        identity = hashlib.sha256("\0".join((uid_of(about), reason, note)).encode()).hexdigest()[:16]
        if not self._is_news(identity, now):
            return
        if not self._budget(uid_of(about), now).spend(now):
            self._observe("dropped")
            _log.info("event dropped: there are too many of this object", reason=reason, about=name_of(about))
            return
        stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        namespace = about["metadata"].get("namespace", "default")
        event: Object = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{name_of(about)}.{identity}{now:%H%M%S%f}", "namespace": namespace},
            "eventTime": stamp,
            "type": kind,
            "reason": reason,
            "action": action,
            "note": note,
            "reportingController": _CONTROLLER,
            "reportingInstance": self._instance[:128],
            "regarding": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": namespace,
                "name": name_of(about),
                "uid": uid_of(about),
                "resourceVersion": about["metadata"].get("resourceVersion", ""),
            },
        }
        try:
            await self._client.create(event, manager="mooncake-operator")
            self._observe("posted")
        except AlreadyExistsError:
            pass
        except KubeError as error:
            self._observe("failed")
            if isinstance(error, ForbiddenError) and error.namespace_terminating:
                return  # nobody is left who would read it
            _log.warning("event not posted", reason=reason, about=name_of(about), error=str(error))

    def _budget(self, uid: str, now: datetime) -> _Budget:
        budget = self._budgets.setdefault(uid, _Budget(now))
        self._budgets.move_to_end(uid)
        while len(self._budgets) > _REMEMBERED:
            self._budgets.popitem(last=False)
        return budget

    def _is_news(self, identity: str, now: datetime) -> bool:
        posted = self._posted.get(identity)
        if posted is not None and (now - posted).total_seconds() < self._quiet_s:
            return False
        self._posted[identity] = now
        self._posted.move_to_end(identity)
        while len(self._posted) > _REMEMBERED:
            self._posted.popitem(last=False)
        return True


def _cut(note: str) -> str:
    """As much of a text as the API server takes, which counts bytes."""
    encoded = note.encode()
    if len(encoded) <= _LONGEST_NOTE_BYTES:
        return note
    mark = "…"
    return encoded[: _LONGEST_NOTE_BYTES - len(mark.encode())].decode(errors="ignore") + mark
