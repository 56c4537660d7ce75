"""From what the API server refuses to what a user is told: only what a user can mend becomes a finding."""

from __future__ import annotations

from mooncake_operator.kube.applier import MANAGER, NameTakenError
from mooncake_operator.kube.errors import (
    FieldConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    Refusal,
)
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding

NAME_TAKEN = "NameTaken"
KIND_MISSING = "KindMissing"
INVALID_OBJECT = "InvalidObject"

_ADVICE = {
    Refusal.QUOTA: (reasons.QUOTA_EXCEEDED, "raise the ResourceQuota, or ask for less"),
    Refusal.POD_SECURITY: (
        reasons.POD_SECURITY,
        "give the namespace a Pod Security level that allows it, or take it out of podTemplate",
    ),
    Refusal.RBAC: (reasons.FORBIDDEN, "the operator's ClusterRole lacks this: install the chart's RBAC"),
    Refusal.ADMISSION: (reasons.FORBIDDEN, "an admission webhook or policy refused it"),
}


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
            return Finding(NAME_TAKEN, f"{error}; delete or rename it")
        case FieldConflictError():
            who = ", ".join(sorted({conflict.manager for conflict in error.conflicts}))
            return Finding(
                reasons.CONFLICT,
                f"{subject}: {error}; let {who} leave these fields to {MANAGER}, or change the cluster",
            )
        case ForbiddenError(refusal=Refusal.NAMESPACE_TERMINATING):
            raise NamespaceEndsError from error
        case ForbiddenError():
            reason, advice = _ADVICE[error.refusal]
            return Finding(reason, f"{subject}: {error}; {advice}")
        case InvalidError():
            return Finding(INVALID_OBJECT, f"{subject}: the API server refuses it: {error}")
        case NotFoundError():
            return Finding(
                KIND_MISSING,
                f"{subject}: the API server does not know its kind; install the CustomResourceDefinitions",
            )
        case _:
            raise error


def is_temporary(error: Exception) -> bool:
    """Whether trying again may help without anybody doing anything."""
    return isinstance(error, KubeError) and not isinstance(
        error, FieldConflictError | ForbiddenError | InvalidError | NotFoundError
    )
