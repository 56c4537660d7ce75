"""A Pod's status as a kubelet would write it. Pure: what has happened goes in, the status comes out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = dict[str, Any]
Stage = Literal["Creating", "Running", "Ready", "Failed"]


@dataclass(slots=True)
class Life:
    """What has happened to one Pod so far.

    Attributes:
        pod_ip: its address.
        stage: how far its containers are.
        started_at: when it was bound, RFC 3339.
        running_at: when its containers started.
        restarts: of the first container.
        waiting: why containers wait, e.g. ErrImagePull; empty where they run.
        message: for people.
        last_end: how the first container ended before.
        failure: why the whole Pod failed.
    """

    pod_ip: str
    started_at: str
    stage: Stage = "Creating"
    running_at: str = ""
    restarts: int = 0
    waiting: str = "ContainerCreating"
    message: str = ""
    last_end: Mapping[str, Any] | None = None
    failure: str = ""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)


def status_of(pod: Mapping[str, Any], life: Life, now: str) -> Status:
    """The status to write.

    Args:
        pod: the Pod as last seen; its readiness gates count.
        life: what has happened.
        now: for conditions that change with this status.
    """
    spec = pod["spec"]
    running = life.stage in ("Running", "Ready")
    containers_ready = life.stage == "Ready"
    status: Status = {
        "phase": {"Creating": "Pending", "Failed": "Failed"}.get(life.stage, "Running"),
        "hostIP": "10.77.0.1",
        "podIP": life.pod_ip,
        "podIPs": [{"ip": life.pod_ip}],
        "startTime": life.started_at,
        "observedGeneration": pod["metadata"].get("generation"),
        "containerStatuses": [
            _container(spec_of, life, is_first=index == 0, running=running, ready=containers_ready)
            for index, spec_of in enumerate(spec["containers"])
        ],
        "conditions": [
            _condition(life, kind, value, now)
            for kind, value in (
                ("PodReadyToStartContainers", life.stage != "Failed"),
                ("Initialized", life.stage != "Creating" or not spec.get("initContainers")),
                ("ContainersReady", containers_ready),
                ("Ready", containers_ready and gates_open(pod)),
            )
        ],
    }
    if spec.get("initContainers"):
        status["initContainerStatuses"] = [_init_container(c, life, running) for c in spec["initContainers"]]
    if life.stage == "Failed":
        status |= {"reason": life.failure, "message": life.message}
    return status


def gates_open(pod: Mapping[str, Any]) -> bool:
    """Whether all readiness gates of a Pod are True."""
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions") or []}
    gates = pod["spec"].get("readinessGates") or []
    return all(conditions.get(gate["conditionType"]) == "True" for gate in gates)


def _container(
    container: Mapping[str, Any], life: Life, *, is_first: bool, running: bool, ready: bool
) -> Status:
    if life.stage == "Failed":
        state: Status = {"terminated": {"exitCode": 137, "reason": life.failure}}
        if is_first and life.last_end is not None:
            state = {"terminated": dict(life.last_end)}
    elif running and not (is_first and life.waiting):
        state = {"running": {"startedAt": life.running_at}}
    else:
        state = {"waiting": {"reason": life.waiting, "message": life.message}}
    described: Status = {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": ready and "running" in state,
        "started": "running" in state,
        "restartCount": life.restarts if is_first else 0,
        "state": state,
        "lastState": {},
    }
    if "running" in state:
        described["containerID"] = f"played://{container['name']}-{life.restarts}"
    if is_first and life.last_end is not None and life.stage != "Failed":
        described["lastState"] = {"terminated": dict(life.last_end)}
    return described


def _init_container(container: Mapping[str, Any], life: Life, running: bool) -> Status:
    stays = container.get("restartPolicy") == "Always"
    state: Status = {"waiting": {"reason": "PodInitializing"}}
    if running:
        done = {"exitCode": 0, "reason": "Completed"}
        state = {"running": {"startedAt": life.running_at}} if stays else {"terminated": done}
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": running,
        "started": running and stays,
        "restartCount": 0,
        "state": state,
        "lastState": {},
    }


def _condition(life: Life, kind: str, value: bool, now: str) -> Status:
    status = "True" if value else "False"
    if life.changed.get(kind, ("",))[0] != status:
        life.changed[kind] = (status, now)
    return {"type": kind, "status": status, "lastTransitionTime": life.changed[kind][1]}
