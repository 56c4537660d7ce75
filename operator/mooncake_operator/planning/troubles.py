"""Why Pods do not run, in the words of people: what is missing, where, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.instances import Instance
from mooncake_operator.planning.observed import ObservedPod, Trouble

_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_CRASH = frozenset({"CrashLoopBackOff"})
_INSUFFICIENT: Sequence[tuple[re.Pattern[str], str, str]] = (
    (re.compile(r"[Ii]nsufficient [\w.-]*/?gpu"), reasons.INSUFFICIENT_GPU, "add nodes with GPUs"),
    (re.compile(r"[Ii]nsufficient rdma/"), reasons.INSUFFICIENT_RDMA, "is the RDMA device plugin there?"),
    (
        re.compile(r"[Ii]nsufficient hugepages-"),
        reasons.INSUFFICIENT_HUGEPAGES,
        "reserve hugepages on the nodes and restart their kubelets",
    ),
    (re.compile(r"persistentvolumeclaim|PersistentVolume|volume node"), reasons.VOLUME_MISSING, "make it"),
    (re.compile(r"[Ii]nsufficient memory"), reasons.INSUFFICIENT_MEMORY, "lower resources.memory"),
    (re.compile(r"[Ii]nsufficient cpu"), reasons.INSUFFICIENT_CPU, "lower resources.cpu"),
)
_REFUSALS: Sequence[tuple[re.Pattern[str], str, str]] = (
    (
        re.compile(r"exceeded quota"),
        reasons.QUOTA_EXCEEDED,
        "raise the namespace's ResourceQuota, or lower replicas",
    ),
    (
        re.compile(r"violates PodSecurity"),
        reasons.POD_SECURITY,
        "label the namespace with a level that allows it, or change podTemplate",
    ),
)


def scheduling(instances: Iterable[Instance]) -> Finding | None:
    """The scheduler's first objection; None = every Pod has a node."""
    waiting = [
        (pod.name, pod.trouble)
        for instance in instances
        for pod in instance.pods
        if pod.trouble is not None and not pod.node and _container_trouble(pod, pod.trouble) is None
    ]
    if not waiting:
        return None
    name, trouble = waiting[0]
    others = f" and {len(waiting) - 1} more Pods" if len(waiting) > 1 else ""
    for pattern, reason, remedy in _INSUFFICIENT:
        if pattern.search(trouble.message):
            return Finding(reason, f"Pod {name}{others}: {trouble.message}; {remedy}")
    return Finding(reasons.UNSCHEDULABLE, f"Pod {name}{others}: {trouble.message or trouble.reason}")


def starting(instances: Iterable[Instance]) -> Finding | None:
    """What keeps containers from running, the most frequent first."""
    found = [
        finding
        for instance in instances
        for pod in instance.pods
        if pod.trouble is not None and (finding := _container_trouble(pod, pod.trouble)) is not None
    ]
    if not found:
        return None
    ((reason, number),) = Counter(finding.reason for finding in found).most_common(1)
    first = next(finding for finding in found if finding.reason == reason)
    others = f" (and {number - 1} more)" if number > 1 else ""
    return Finding(reason, first.message + others)


def refusal(status: int, message: str) -> Finding:
    """Why the API server did not take a Pod.

    Args:
        status: of the HTTP answer.
        message: of the answer's Status object.
    """
    for pattern, reason, remedy in _REFUSALS:
        if pattern.search(message):
            return Finding(reason, f"{message}; {remedy}")
    if status == 403:
        return Finding(reasons.FORBIDDEN, f"{message}; let the operator's Role allow it")
    if status in (400, 422):
        return Finding(reasons.INVALID_POD, f"{message}; change podTemplate or resources of the pool")
    return Finding(reasons.CREATE_FAILED, message)


def _container_trouble(pod: ObservedPod, trouble: Trouble) -> Finding | None:
    where = f"Pod {pod.name}, {trouble.message or trouble.reason}"
    if trouble.reason in _IMAGE:
        return Finding(
            reasons.IMAGE_UNAVAILABLE, f"{where}; is the image's name right, and a pull secret there?"
        )
    if trouble.reason in _CONFIG:
        return Finding(reasons.CONFIG_MISSING, f"{where}; make what is missing in the Pod's namespace")
    if trouble.reason in _CRASH:
        ending = f" ({pod.ending.message})" if pod.ending is not None else ""
        return Finding(reasons.CRASHING, f"{where}{ending}; kubectl logs {pod.name} --previous says why")
    return None
