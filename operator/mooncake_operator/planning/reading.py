"""From Kubernetes objects and the schedulers' answer to the plain picture that planning works on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from mooncake_core.registry import InstanceState, Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.manifests.objects import RANK_LABEL, REVISION_LABEL
from mooncake_operator.planning.manifests.revisions import (
    GPUS,
    LEADER,
    PAIRING_LABEL,
    POOL_KEY,
    SIZE,
)
from mooncake_operator.planning.observed import (
    Condition,
    Gate,
    ObservedPod,
    PoolHistory,
    Recreation,
    Registration,
    Revision,
    Trouble,
)
from mooncake_operator.planning.troubles import KEEPS_ENDING

Object = Mapping[str, Any]

_POOL_LABEL = "mooncake.io/pool"
_INSTANCE_LABEL = "mooncake.io/instance"
_SIDECAR = "sidecar"
_LONGEST_MESSAGE = 1024
_PULL_AGAIN = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')
"""What the kubelet puts before the reason while it waits: without it both states read the same."""


def seconds(stamp: str | None) -> float:
    """Unix seconds of a Kubernetes timestamp; 0 for none."""
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def controller_uid(obj: Object) -> str:
    """Uid of an object's controller; empty = it has none."""
    references = obj["metadata"].get("ownerReferences") or ()
    return next((str(ref["uid"]) for ref in references if ref.get("controller")), "")


def observed_pod(pod: Object) -> ObservedPod:
    """One Pod, the product's or any other of the namespace."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    rank = _number(labels.get(RANK_LABEL))
    deleted = metadata.get("deletionTimestamp")
    return ObservedPod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner_uid=controller_uid(pod),
        # A stranger may bear the public label only, and is told of nevertheless.
        pool=labels.get(POOL_KEY) or labels.get(_POOL_LABEL, ""),
        instance=labels.get(_INSTANCE_LABEL, metadata["name"]),
        rank=rank,
        revision=labels.get(REVISION_LABEL, ""),
        pairing=labels.get(PAIRING_LABEL, ""),
        leader_uid=annotations.get(LEADER, ""),
        size=_number(annotations.get(SIZE)) or 1,
        gpus=_number(annotations.get(GPUS)),
        phase=status.get("phase", "Pending"),
        containers_ready=_condition(status, "ContainersReady").get("status") == "True",
        containers_ended=any(map(_is_down, status.get("containerStatuses") or ())),
        gate=_gate(status),
        engine_restarts=sum(
            int(container.get("restartCount", 0))
            for container in status.get("containerStatuses") or ()
            if container.get("name") != _SIDECAR
        ),
        node=(pod.get("spec") or {}).get("nodeName", ""),
        created_s=seconds(metadata.get("creationTimestamp")),
        deleted_s=seconds(deleted) if deleted else None,
        trouble=_trouble(status),
        ending=_ending(status),
    )


def observed_revision(revision: Object) -> Revision:
    """One ControllerRevision."""
    labels = revision["metadata"].get("labels") or {}
    kept = ((revision.get("data") or {}).get("pod") or {}).get("metadata") or {}
    annotations = kept.get("annotations") or {}
    return Revision(
        name=labels.get(REVISION_LABEL, ""),
        pool=labels.get(POOL_KEY, ""),
        number=int(revision.get("revision", 0)),
        pairing=labels.get(PAIRING_LABEL, ""),
        owner_uid=controller_uid(revision),
        size=_number(annotations.get(SIZE)) or 1,
        gpus_per_pod=_number(annotations.get(GPUS)),
    )


def registrations(views: Iterable[Object]) -> dict[str, Registration]:
    """The instances of a scheduler's `GET /instances`, by id; stores are no instances."""
    found = {}
    for view in views:
        if view.get("role") == Role.STORE.value:
            continue
        load = view.get("load") or {}
        in_flight = sum(int(load.get(part) or 0) for part in ("queued", "batch", "arriving"))
        found[str(view["id"])] = Registration(InstanceState(view["state"]), in_flight)
    return found


def pool_history(status: Object | None) -> PoolHistory:
    """What a pool's status says of the past."""
    status = status or {}
    return PoolHistory(
        current_revision=status.get("currentRevision", ""),
        update_revision=status.get("updateRevision", ""),
        update_started_s=seconds(status.get("updateStartedTime")),
        recreations=tuple(_recreation(item) for item in status.get("recreations") or ()),
        last_failures=tuple(_recreation(item) for item in status.get("lastFailures") or ()),
        conditions={
            item["type"]: Condition(
                item["status"], item.get("reason", ""), seconds(item.get("lastTransitionTime"))
            )
            for item in status.get("conditions") or ()
        },
    )


def _recreation(item: Object) -> Recreation:
    return Recreation(
        instance=item["instance"],
        life=item.get("life", ""),
        failures=int(item.get("failures", 1)),
        at_s=seconds(item.get("time")),
        revision=item.get("revision", ""),
        pairing=item.get("pairing", ""),
        reason=item.get("reason", ""),
        message=item.get("message", ""),
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _condition(status: Object, kind: str) -> Object:
    found: Object = next((c for c in status.get("conditions") or () if c.get("type") == kind), {})
    return found


def _is_down(container: Object) -> bool:
    return "running" not in (container.get("state") or {}) or container.get("started") is False


def _gate(status: Object) -> Gate | None:
    condition = _condition(status, reasons.GATE)
    if not condition:
        return None
    since_s = seconds(condition.get("lastTransitionTime"))
    return Gate(condition.get("status") == "True", condition.get("reason", ""), since_s)


def _trouble(status: Object) -> Trouble | None:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        since_s = seconds(scheduled.get("lastTransitionTime"))
        return Trouble(scheduled.get("reason", ""), _short(scheduled.get("message", "")), since_s)
    for container in _containers(status):
        # Between two restarts it runs or waits by turns; nothing has changed for people before it is ready.
        if _keeps_ending(container):
            message = f"container {container.get('name')} ended {container['restartCount']} times"
            return Trouble(KEEPS_ENDING, message)
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            said = _PULL_AGAIN.sub("", waiting.get("message") or waiting["reason"])
            return Trouble(waiting["reason"], _short(f"container {container.get('name')}: {said}"))
    return None


def _keeps_ending(container: Object) -> bool:
    return (
        bool(container.get("restartCount")) and not container.get("ready") and _failed(container) is not None
    )


def _failed(container: Object) -> Object | None:
    """How a container ended badly, now or before it was started again."""
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        ended: Object | None = state.get("terminated")
        if ended and ended.get("exitCode"):
            return ended
    return None


def _ending(status: Object) -> Trouble | None:
    if status.get("phase") == "Failed" and status.get("reason"):
        return Trouble(status["reason"], _short(status.get("message", "")))
    for container in _containers(status):
        ended = _failed(container)
        if ended is not None:
            message = f"container {container.get('name')} exited with {ended['exitCode']}"
            if said := _last_words(ended):
                message += f", {said}"
            return Trouble(ended.get("reason") or "Ended", _short(message), seconds(ended.get("finishedAt")))
    return _ended_well(status)


def _ended_well(status: Object) -> Trouble | None:
    """Of a Pod that is over though none of its containers failed."""
    if status.get("phase") != "Succeeded":
        return None
    return Trouble("Completed", "all containers exited with 0")


def _last_words(ended: Object) -> str:
    """The last line of a termination message, which is the log's end where a container failed."""
    lines = [line.strip() for line in (ended.get("message") or "").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _containers(status: Object) -> list[Object]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"
