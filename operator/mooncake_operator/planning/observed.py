"""The world as it was found: a plain picture, gathered by I/O, that planning decides on.

All times are Unix seconds. Nothing here is remembered from one plan to the next: what must outlive an
operator stands in the objects the picture was taken of (a Pod's gate, a pool's status, a
ControllerRevision).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mooncake_core.registry import InstanceState


@dataclass(frozen=True, slots=True)
class Gate:
    """The condition `mooncake.io/routable` of an instance's leading Pod."""

    status: bool
    reason: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a Pod from running, as the scheduler or the kubelet put it."""

    reason: str
    message: str
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """One Pod that bears a pool's labels or one of its names, whoever made it."""

    name: str
    uid: str
    owner_uid: str
    """Of its controller; empty = nobody's."""
    pool: str
    instance: str
    """Name of the instance, which is its leader's name."""
    rank: int = 0
    revision: str = ""
    pairing: str = ""
    """The registry's revision: prefill and decode work together only inside one."""
    leader_uid: str = ""
    """Workers only: the leader with which this one was started."""
    size: int = 1
    """Pods that its instance consists of, by the revision it was made from."""
    gpus: int = 0
    phase: str = "Pending"
    containers_ready: bool = False
    containers_ended: bool = False
    """Some container does not run, or runs anew and has not come up yet.

    One that is merely slow to answer its readiness probe does run.
    """
    gate: Gate | None = None
    engine_restarts: int = 0
    node: str = ""
    created_s: float = 0.0
    deleted_s: float | None = None
    """`deletionTimestamp`: when it is to be gone, its grace included."""
    trouble: Trouble | None = None
    ending: Trouble | None = None
    """How it came to its end, of a terminal Pod or a container that was restarted."""


@dataclass(frozen=True, slots=True)
class Registration:
    """An instance as the schedulers see it (`GET /instances`)."""

    state: InstanceState
    in_flight: int = 0
    """Requests promised to it and not finished."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A ControllerRevision of a pool."""

    name: str
    """The hash that its Pods are labelled with."""
    pool: str
    number: int
    pairing: str = ""
    owner_uid: str = ""
    size: int = 1
    """Pods of one instance."""
    gpus_per_pod: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.size * self.gpus_per_pod


@dataclass(frozen=True, slots=True)
class Recreation:
    """An instance that failed and is made again: kept in the pool's status before its Pods go."""

    instance: str
    life: str
    """uid of the leading Pod that failed, so that one failure counts once."""
    failures: int
    """In a row, without a stable time between."""
    at_s: float
    revision: str
    pairing: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a status, as it was written last."""

    status: str
    reason: str
    since_s: float
    """When its status last changed."""


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """What a pool's status says of the past."""

    current_revision: str = ""
    """What held before the newest revision; the same once all instances have that one."""
    update_revision: str = ""
    update_started_s: float = 0.0
    recreations: tuple[Recreation, ...] = ()
    last_failures: tuple[Recreation, ...] = ()
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """By type."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that planning knows of the world at one moment."""

    now_s: float
    pods: tuple[ObservedPod, ...] = ()
    revisions: tuple[Revision, ...] = ()
    registry: Mapping[str, Registration] | None = None
    """By instance; None while no scheduler answers, which is no reason to think that anything changed."""
    histories: Mapping[str, PoolHistory] = field(default_factory=dict)
    namespace_terminating: bool = False

    def revision(self, pool: str, owner_uid: str, name: str) -> Revision | None:
        """A pool's revision, if it is on record."""
        own = (r for r in self.revisions if (r.pool, r.owner_uid, r.name) == (pool, owner_uid, name))
        return next(own, None)

    def history(self, pool: str) -> PoolHistory:
        """A pool's past, or none."""
        return self.histories.get(pool, PoolHistory())
