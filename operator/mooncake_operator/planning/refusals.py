"""Why the API server does not take an object, in the words of people: only words tell its reasons apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding

_KNOWN: Sequence[tuple[re.Pattern[str], str, str]] = (
    (
        # A quota on what the Pod does not say: the sum alone is not to blame.
        re.compile(r"failed quota: .* must specify"),
        reasons.QUOTA_EXCEEDED,
        "the namespace's ResourceQuota counts it: give the namespace a LimitRange with defaults, or say it:"
        " engines and stores have resources.cpu and resources.memory of the pool, other containers their"
        " resources in podTemplate",
    ),
    (
        re.compile(r"exceeded quota|failed quota"),
        reasons.QUOTA_EXCEEDED,
        "raise the namespace's ResourceQuota, or ask for less: fewer replicas, smaller resources",
    ),
    (
        re.compile(r"violates PodSecurity"),
        reasons.POD_SECURITY,
        "label the namespace with a level that allows it, or change podTemplate",
    ),
    (
        re.compile(r"(maximum|minimum) \S+ usage per |limit to request ratio per "),
        reasons.LIMIT_RANGE,
        "ask for what the namespace's LimitRange allows, or change the LimitRange",
    ),
    (
        re.compile(r"no PriorityClass|RuntimeClass .*not found|service ?account .*not found"),
        reasons.REFERENCE_MISSING,
        "make it, or take it out of podTemplate",
    ),
    (
        re.compile(r"failed calling webhook"),
        reasons.WEBHOOK_UNAVAILABLE,
        "bring the webhook's service back, or remove its configuration",
    ),
    (
        re.compile(r"admission webhook |ValidatingAdmissionPolicy "),
        reasons.ADMISSION_REFUSED,
        "a policy of this Kubernetes cluster forbids it: change what it names, or ask its owner",
    ),
    (
        re.compile(r"User \S+ cannot "),
        reasons.FORBIDDEN,
        "the operator's role lacks this: install the chart's RBAC",
    ),
)

_ABOVE_LIMIT = re.compile(r"must be less than or equal to \S+ limit of ")
_INVALID = re.compile(r"^\w+ \"[^\"]*\" is invalid: ")


def known_refusal(message: str) -> Finding | None:
    """Whose refusal it was, where the message tells; None = it does not."""
    for pattern, reason, remedy in _KNOWN:
        if pattern.search(message):
            return Finding(reason, f"{message}; {remedy}")
    return None


def refusal(status: int, message: str) -> Finding:
    """Why the API server did not take a Pod.

    Args:
        status: of the HTTP answer; 403 where only the message is known, as from a Deployment's status.
        message: of the answer's Status object.
    """
    if known := known_refusal(message):
        return known
    if _ABOVE_LIMIT.search(message):
        return Finding(
            reasons.INVALID_POD,
            f"{message}; a limit that nobody wrote is a default of the namespace's LimitRange: write request"
            " and limit of this container in podTemplate, or resources of the pool",
        )
    if status == 403 and not _INVALID.search(message):
        return Finding(
            reasons.ADMISSION_REFUSED, f"{message}; an admission plugin of the API server forbids it"
        )
    if status in (400, 403, 422):
        return Finding(reasons.INVALID_POD, f"{message}; change podTemplate, or resources of the pool")
    return Finding(reasons.CREATE_FAILED, message)
