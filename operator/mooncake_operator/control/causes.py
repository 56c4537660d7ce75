"""Why Pods do not get on where their status is silent: the kubelet then says it in Events only.

A volume that cannot be mounted, a sandbox that cannot be made, a claim whose StorageClass is not there: the
Pod's status says `ContainerCreating`, or that there is no volume, for ever. So Events are read, of the Pods
that have been silent for a while and of nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.resources import EVENT, Object, is_terminating, name_of, uid_of
from mooncake_operator.planning.observed import Trouble
from mooncake_operator.planning.reading import observed_pod, seconds

SILENT_S = 10.0
"""How long a Pod may take to start before its Events are read."""
_AGAIN_S = 25.0
_AT_ONCE = 3
"""Pods asked about in one pass: what holds one back mostly holds the others too."""
_UNBOUND = re.compile(r"PersistentVolumeClaim|persistentvolumeclaim")


@dataclass(slots=True)
class Causes:
    """Of one cluster; what it remembers saves requests only."""

    client: Client
    namespace: str
    _asked: dict[str, tuple[float, Trouble | None]] = field(default_factory=dict)
    """By a Pod's uid: when, and what came of it."""

    async def of(self, pods: Iterable[Object], now_s: float) -> Mapping[str, Trouble]:
        """Troubles by the Pods' uids.

        Args:
            pods: of the cluster.
            now_s: Unix seconds.
        """
        silent = {uid_of(pod): pod for pod in pods if _is_silent(pod, now_s)}
        self._asked = {uid: kept for uid, kept in self._asked.items() if uid in silent}
        due = [uid for uid in silent if now_s - self._asked.get(uid, (0.0, None))[0] >= _AGAIN_S]
        for uid in due[:_AT_ONCE]:
            self._asked[uid] = (now_s, await self._cause(silent[uid]))
        return {uid: trouble for uid, (_, trouble) in self._asked.items() if trouble is not None}

    async def _cause(self, pod: Object) -> Trouble | None:
        said = observed_pod(pod).trouble
        if said is None:
            event = await self._last_warning({"regarding.uid": uid_of(pod)})
            return Trouble(event["reason"], _note(event)) if event else None
        claims = [await self._claim(name) for name in _claims(pod)]
        return Trouble(said.reason, "; ".join([said.message, *filter(None, claims)]), said.since_s)

    async def _claim(self, name: str) -> str:
        event = await self._last_warning({"regarding.kind": "PersistentVolumeClaim", "regarding.name": name})
        return f"PersistentVolumeClaim {name}: {_note(event)}" if event else ""

    async def _last_warning(self, about: Mapping[str, str]) -> Object | None:
        fields = {**about, "type": "Warning"}
        return max(
            await self.client.list_all(EVENT, self.namespace, fields=fields), key=_last_s, default=None
        )


def next_look_s(pods: Iterable[Object], now_s: float) -> float | None:
    """When to look for causes again, if anything is or may soon be silent."""
    times = []
    for pod in pods:
        if _is_silent(pod, now_s):
            times.append(now_s + _AGAIN_S)
        elif _is_silent(pod, now_s + SILENT_S):
            times.append(seconds(pod["metadata"].get("creationTimestamp")) + SILENT_S + 1)
    return min(times, default=None)


def _is_silent(pod: Object, now_s: float) -> bool:
    """Whether a Pod has not started for a while and does not say enough of why."""
    status = pod.get("status") or {}
    if is_terminating(pod) or status.get("phase", "Pending") != "Pending":
        return False
    if now_s - seconds(pod["metadata"].get("creationTimestamp")) < SILENT_S:
        return False
    trouble = observed_pod(pod).trouble
    if trouble is None:
        return bool((pod.get("spec") or {}).get("nodeName"))
    return bool(_UNBOUND.search(trouble.message)) and bool(_claims(pod))


def _claims(pod: Object) -> Sequence[str]:
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    claims = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes]
    return [claim for claim in claims if claim]


def _last_s(event: Object) -> tuple[float, str]:
    series = event.get("series") or {}
    stamps = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return max(seconds(stamp) for stamp in stamps), name_of(event)


def _note(event: Object) -> str:
    return " ".join(str(event.get("note") or event["reason"]).split())[:1024]
