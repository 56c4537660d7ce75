"""From what the API server refuses to what a user is told: only what a user can mend becomes a finding."""

from __future__ import annotations

from mooncake_operator.kube.applier import MANAGER, NameTakenError
from mooncake_operator.kube.errors import (
    FieldConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    UnavailableError,
)
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import (
    Action,
    AddFinalizer,
    CreatePod,
    DeletePod,
    DeleteRevision,
    Finding,
    RecordRevision,
    RemoveFinalizer,
    SetGate,
)
from mooncake_operator.planning.manifests.revisions import revision_name
from mooncake_operator.planning.refusals import known_refusal, refusal

_REMEDIES = {"Deployment": "; change spec.scheduler.podTemplate"}
"""By kind, what of a user's makes an object invalid; of other kinds nothing does."""


class NamespaceEndsError(Exception):
    """The namespace is being deleted: nothing is to be made or reported any more."""


def finding_of(error: Exception, subject: str) -> Finding:
    """What to tell a user about a refusal.

    Args:
        error: what went wrong with one object.
        subject: the object, e.g. `Service kimi-scheduler`.

    Raises:
        NamespaceEndsError: the refusal was for that.
        Exception: the error itself, when only trying again helps.
    """
    match error:
        case NameTakenError():
            return Finding(reasons.NAME_TAKEN, str(error))
        case FieldConflictError():
            who = ", ".join(sorted({conflict.manager for conflict in error.conflicts}))
            return Finding(
                reasons.CONFLICT,
                f"{subject}: {error}; let {who} leave these fields to {MANAGER}, or change the cluster",
            )
        case ForbiddenError(namespace_terminating=True):
            raise NamespaceEndsError from error
        case ForbiddenError():
            found = refusal(error.status, str(error))
            return Finding(found.reason, f"{subject}: {found.message}")
        case InvalidError():
            known = known_refusal(str(error))
            remedy = _REMEDIES.get(subject.split(" ")[0], "")
            found = known or Finding(reasons.INVALID_OBJECT, f"the API server refuses it: {error}{remedy}")
            return Finding(found.reason, f"{subject}: {found.message}")
        case UnavailableError() if (known := known_refusal(str(error))) is not None:
            return Finding(known.reason, f"{subject}: {known.message}")
        case NotFoundError():
            return Finding(
                reasons.KIND_MISSING,
                f"{subject}: the API server does not know its kind; install the CustomResourceDefinitions",
            )
        case _:
            raise error


def finding_of_action(action: Action, error: KubeError) -> Finding:
    """What a user must mend before an action of a plan can be carried out.

    Raises:
        NamespaceEndsError: nothing can be made any more.
        KubeError: the error itself, when only trying again helps.
    """
    match action:
        case CreatePod():
            # What refuses Pods names them itself.
            if isinstance(error, InvalidError):
                return refusal(error.status, str(error))
            subject = f"Pod {action.pod}"
        case DeletePod():
            subject = f"deleting Pod {action.pod}"
        case SetGate():
            subject = f"the readiness gate of Pod {action.pod}"
        case RecordRevision():
            subject = f"ControllerRevision {revision_name(action.pool, action.revision)}"
        case DeleteRevision():
            subject = f"deleting ControllerRevision {revision_name(action.pool, action.revision)}"
        case AddFinalizer() | RemoveFinalizer():
            subject = f"the finalizers of pool {action.pool}"
        case _:
            raise error
    return finding_of(error, subject)
