"""Why Pods do not run, in the words of people: what is missing, where, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.observed import ObservedPod, Trouble

KEEPS_ENDING = "CrashLoopBackOff"
"""Kubelet's word for a container that ends again and again."""
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_VOLUME = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_SANDBOX = frozenset({"FailedCreatePodSandBox", "NetworkNotReady", "FailedPodSandBoxStatus"})
_OBJECT_NOT_FOUND = re.compile(r"(configmap|secret)s? \S+ not found")
_INSUFFICIENT: Sequence[tuple[re.Pattern[str], str, str]] = (
    (
        re.compile(r"[Ii]nsufficient ([\w.-]*/?gpu|nvidia\.com/mig-)"),
        reasons.INSUFFICIENT_GPU,
        "add nodes with free GPUs, or lower replicas or resources.gpu",
    ),
    (
        re.compile(r"[Ii]nsufficient rdma/"),
        reasons.INSUFFICIENT_RDMA,
        "is the RDMA device plugin on these nodes? kubectl describe node shows what it offers",
    ),
    (
        re.compile(r"[Ii]nsufficient hugepages-"),
        reasons.INSUFFICIENT_HUGEPAGES,
        "reserve hugepages on the nodes and restart their kubelets",
    ),
    (
        re.compile(r'persistentvolumeclaim "[^"]*" not found'),
        reasons.VOLUME_MISSING,
        "make the PersistentVolumeClaim in the Pod's namespace",
    ),
    (
        re.compile(r"PersistentVolumeClaim|persistent ?volume|volume node affinity", re.IGNORECASE),
        reasons.VOLUME_UNBOUND,
        "its PersistentVolumeClaim has no volume here: kubectl describe pvc says why",
    ),
    (
        re.compile(r"[Ii]nsufficient memory"),
        reasons.INSUFFICIENT_MEMORY,
        "add nodes, or lower resources.memory",
    ),
    (re.compile(r"[Ii]nsufficient cpu"), reasons.INSUFFICIENT_CPU, "add nodes, or lower resources.cpu"),
    (
        re.compile(r"node affinity/selector"),
        reasons.NODE_UNMATCHED,
        "label a node as nodeSelector or affinity of podTemplate want it, or change them",
    ),
    (
        re.compile(r"untolerated taint"),
        reasons.UNTOLERATED_TAINT,
        "add a toleration to podTemplate, or take the taint off a node",
    ),
)


def scheduling(pods: Iterable[ObservedPod]) -> Finding | None:
    """The scheduler's first objection; None = every Pod has a node."""
    waiting = [
        (pod.name, pod.trouble)
        for pod in pods
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


def starting(pods: Iterable[ObservedPod]) -> Finding | None:
    """What keeps containers from running, the most frequent first."""
    found = [
        finding
        for pod in pods
        if pod.trouble is not None and (finding := _container_trouble(pod, pod.trouble)) is not None
    ]
    if not found:
        return None
    ((reason, number),) = Counter(finding.reason for finding in found).most_common(1)
    first = next(finding for finding in found if finding.reason == reason)
    others = f" (and {number - 1} more)" if number > 1 else ""
    return Finding(reason, first.message + others)


def _container_trouble(pod: ObservedPod, trouble: Trouble) -> Finding | None:
    where = f"Pod {pod.name}, {trouble.message or trouble.reason}"
    if trouble.reason in _IMAGE:
        return Finding(
            reasons.IMAGE_UNAVAILABLE, f"{where}; is the image's name right, and a pull secret there?"
        )
    if trouble.reason in _CONFIG or (trouble.reason in _VOLUME and _OBJECT_NOT_FOUND.search(trouble.message)):
        return Finding(reasons.CONFIG_MISSING, f"{where}; make what is missing in the Pod's namespace")
    if trouble.reason in _VOLUME:
        return Finding(reasons.VOLUME_MISSING, f"{where}; node {pod.node} cannot mount it")
    if trouble.reason in _SANDBOX:
        return Finding(
            reasons.SANDBOX_FAILED,
            f"{where}; node {pod.node} cannot start Pods: look at its network and runtime",
        )
    if trouble.reason == KEEPS_ENDING:
        ending = f" ({pod.ending.message})" if pod.ending is not None else ""
        return Finding(reasons.CRASHING, f"{where}{ending}; kubectl logs {pod.name} --previous says why")
    return None
