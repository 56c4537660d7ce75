"""Kubernetes Events: what users must notice, where `kubectl describe` shows it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import structlog

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import AlreadyExistsError, KubeError
from mooncake_operator.kube.resources import EVENT, Object, name_of, uid_of

_log = structlog.get_logger()
_CONTROLLER = "mooncake.io/operator"
_LONGEST_NOTE = 1024
_REMEMBERED = 4096


def _utc_now() -> datetime:
    return datetime.now(UTC)


class EventRecorder:
    """Posts Events; the same Event of the same object at most once in `quiet_s`.

    An Event that cannot be posted is logged and forgotten: nothing may depend on it.
    """

    def __init__(
        self,
        client: Client,
        *,
        instance: str,
        quiet_s: float = 600.0,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """Take the client and this process's name."""
        self._client = client
        self._instance = instance
        self._quiet_s = quiet_s
        self._now = now
        self._posted: OrderedDict[str, datetime] = OrderedDict()

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
        note = note if len(note) <= _LONGEST_NOTE else note[: _LONGEST_NOTE - 1] + "…"
        now = self._now()
        identity = hashlib.sha256("\0".join((uid_of(about), reason, note)).encode()).hexdigest()[:16]
        if not self._is_news(identity, now):
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
        except AlreadyExistsError:
            pass
        except KubeError as error:
            _log.warning("event not posted", reason=reason, about=name_of(about), error=str(error))

    def _is_news(self, identity: str, now: datetime) -> bool:
        posted = self._posted.get(identity)
        if posted is not None and (now - posted).total_seconds() < self._quiet_s:
            return False
        self._posted[identity] = now
        self._posted.move_to_end(identity)
        while len(self._posted) > _REMEMBERED:
            self._posted.popitem(last=False)
        return True
