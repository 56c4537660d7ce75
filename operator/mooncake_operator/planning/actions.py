"""What a plan asks for: data that the control loop carries out in the order given, up to the first error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Put the finalizer on a pool, before anything is made that must be drained."""

    pool: str


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Let a pool go."""

    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordRevision:
    """Keep a ControllerRevision of what new Pods are made from; where it exists, number it as the newest."""

    pool: str
    revision: str
    number: int


@dataclass(frozen=True, slots=True)
class DeleteRevision:
    """Forget a revision that no Pod has and that is older than the history wanted."""

    pool: str
    revision: str


@dataclass(frozen=True, slots=True)
class SetGate:
    """Patch the condition `mooncake.io/routable` in a leading Pod's status, its transition time = now."""

    pod: str
    uid: str
    status: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class MarkDrain:
    """Ask the schedulers to place nothing more on an instance."""

    instance: str


@dataclass(frozen=True, slots=True)
class Unmark:
    """Let the schedulers use an instance again."""

    instance: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one Pod, with the uid as a precondition: its successor of the same name is not meant."""

    pod: str
    uid: str
    instance: str
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create (POST, never apply) one Pod from a recorded revision.

    409 = the name is taken: read again; the next plan compares the owner's uid and takes another name.
    """

    pod: str
    pool: str
    instance: str
    rank: int
    revision: str
    leader_uid: str = ""
    """Workers only: the leader that they belong to, kept as an annotation."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Nothing to do until something happens; look again at `until_s` at the latest."""

    reason: str
    subject: str
    message: str
    until_s: float | None = None


Action: TypeAlias = (
    AddFinalizer
    | RemoveFinalizer
    | RecordRevision
    | DeleteRevision
    | SetGate
    | MarkDrain
    | Unmark
    | DeletePod
    | CreatePod
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason for a condition, and the words for people: what, where, and what to do."""

    reason: str
    message: str
