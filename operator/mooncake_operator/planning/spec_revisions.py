"""The history of what somebody wrote: a cluster's spec, or that of a pool written on its own, for an undo.

The revisions of pools hold rendered Pods, from which no spec can be had again. These hold the spec, in
ControllerRevisions of their own. What says how many instances there are and how they are replaced is no part
of a revision, as with Deployments: going back changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_core.api.base import ApiModel
from mooncake_operator.planning.manifests.objects import Object, digest, labels
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.manifests.revisions import owner_reference

SPEC_LABEL = "mooncake.io/spec-revision"
"""Label of these ControllerRevisions: the hash of what they keep."""
CAUSE = "kubernetes.io/change-cause"
"""Annotation that `kubectl rollout history` shows too."""
REVISIONS_KEPT = 10
"""Earlier ones, besides the present."""

_ENTRIES = ("prefillPools", "decodePools", "kvCachePools")
_OF_THE_CLUSTER = ("coordination",)
_OF_A_POOL = ("replicas", "declaredReplicas", "clusterRef", "update", "disruption", "autoscaling")


@dataclass(frozen=True, slots=True)
class History:
    """What is to be done so that the present spec is the newest on record."""

    record: Object | None
    """To be made; None = it is on record."""
    forget: tuple[Object, ...] = ()
    """Live ones that are to go first: the present spec's own under an old number, and those too many."""


def essential(spec: Mapping[str, Any]) -> Object:
    """A spec without what says how many and how: what makes two revisions differ."""
    if not any(field in spec for field in _ENTRIES):
        return {field: value for field, value in spec.items() if field not in _OF_A_POOL}
    kept = {field: value for field, value in spec.items() if field not in _OF_THE_CLUSTER}
    for field in _ENTRIES:
        kept[field] = [essential(entry) for entry in spec.get(field) or ()]
    return kept


def identity(spec: ApiModel) -> str:
    """Short hash of a spec as a user wrote it; defaults that later versions add do not change it."""
    return digest(essential(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)))


def undone(present: Mapping[str, Any], kept: Mapping[str, Any]) -> Object:
    """The spec of an earlier revision with the numbers of today.

    Args:
        present: the live spec.
        kept: the earlier one, whole. Entries that are no longer there come back with the numbers they had.
    """
    if not any(field in kept for field in (*_ENTRIES, "model")):
        return {**essential(kept), **_only(present, _OF_A_POOL)}
    spec = {**essential(kept), **_only(present, _OF_THE_CLUSTER)}
    for field in _ENTRIES:
        now = {entry["name"]: entry for entry in present.get(field) or ()}
        spec[field] = [_undone_entry(now.get(then["name"]), then) for then in kept.get(field) or ()]
    return spec


def history_of(plan: Plan, owner: Mapping[str, Any], spec: ApiModel, revisions: Sequence[Object]) -> History:
    """What to record of an owner's present spec, and what to forget.

    Args:
        plan: of the cluster, for labels.
        owner: the live cluster, or a live pool that was written on its own.
        spec: its spec, checked.
        revisions: the live ones of this owner, in any order.
    """
    own = sorted(revisions, key=lambda revision: int(revision["revision"]))
    wanted = identity(spec)
    if own and _identity_of(own[-1]) == wanted:
        return History(None, tuple(own[: -(REVISIONS_KEPT + 1)]))
    number = int(own[-1]["revision"]) + 1 if own else 1
    same = [revision for revision in own if _identity_of(revision) == wanted]
    others = [revision for revision in own if _identity_of(revision) != wanted]
    return History(
        _revision(plan, owner, wanted, number), (*same, *others[: max(len(others) - REVISIONS_KEPT, 0)])
    )


def _revision(plan: Plan, owner: Mapping[str, Any], wanted: str, number: int) -> Object:
    name = owner["metadata"]["name"]
    cause = (owner["metadata"].get("annotations") or {}).get(CAUSE)
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": f"{name}-spec-{wanted}",
            "namespace": plan.namespace,
            "labels": labels(plan, "revision") | {SPEC_LABEL: wanted},
            "annotations": {CAUSE: cause} if cause else {},
            "ownerReferences": [owner_reference(owner)],
        },
        "revision": number,
        "data": {"spec": dict(owner["spec"])},
    }


def _identity_of(revision: Mapping[str, Any]) -> str:
    return str((revision["metadata"].get("labels") or {}).get(SPEC_LABEL, ""))


def _undone_entry(now: Mapping[str, Any] | None, then: Mapping[str, Any]) -> Object:
    if now is None:
        return dict(then)
    return {**essential(then), **_only(now, _OF_A_POOL)}


def _only(spec: Mapping[str, Any], fields: Sequence[str]) -> Object:
    return {field: spec[field] for field in fields if field in spec}
