"""What the API server refuses, as types: what to do next depends on why it refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

_MANAGER = re.compile(r'conflict with "([^"]*)"')
_UNTYPED = re.compile(r"failed to (create typed patch object|convert new object) \(")
"""How a server-side apply of what its kind's schema does not allow is answered: by 500, though trying again
changes nothing (apimachinery, `managedfields/internal/structuredmerge.go`)."""


class KubeError(Exception):
    """An answer that is no success, or none at all."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float | None = None) -> None:
        """Take what the server's Status object says; `status` is 0 when there was no answer."""
        super().__init__(message or reason or f"HTTP {status}")
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class NotFoundError(KubeError):
    """The object, or its whole kind, is not there."""


class AlreadyExistsError(KubeError):
    """A name is taken."""


class PreconditionError(KubeError):
    """The object is no longer the one (uid) or no longer as it was (resourceVersion) when it was read."""


@dataclass(frozen=True, slots=True)
class FieldConflict:
    """A field that another field manager has set to something else."""

    manager: str
    field: str


class FieldConflictError(KubeError):
    """A server-side apply without force met fields of other managers."""

    def __init__(self, message: str, conflicts: tuple[FieldConflict, ...]) -> None:
        """Take the conflicts."""
        super().__init__(409, "Conflict", message)
        self.conflicts = conflicts

    def __str__(self) -> str:
        """Who holds what, in one sentence."""
        by_manager: dict[str, list[str]] = {}
        for conflict in self.conflicts:
            by_manager.setdefault(conflict.manager, []).append(conflict.field.removeprefix("."))
        return "; ".join(f"{manager} manages {', '.join(fields)}" for manager, fields in by_manager.items())


class GoneError(KubeError):
    """A resourceVersion or a continue token is too old: list again."""


class InvalidError(KubeError):
    """The object breaks the schema or a rule."""


class UnauthorizedError(KubeError):
    """The credentials are not accepted."""


class ForbiddenError(KubeError):
    """Not allowed: by RBAC, a quota, a Pod Security level, or because the namespace ends."""

    def __init__(self, reason: str, message: str, *, namespace_terminating: bool = False) -> None:
        """Take what the server says, and whether the only reason is that the namespace is being deleted."""
        super().__init__(403, reason, message)
        self.namespace_terminating = namespace_terminating


class ThrottledError(KubeError):
    """Too many requests, or an eviction that a disruption budget forbids for now."""


class UnavailableError(KubeError):
    """No answer, or the server's own fault: the same request may succeed later."""


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    """The error that an answer stands for; any body will do."""
    document = _status_document(body)
    text = document.get("message")
    message = text if isinstance(text, str) else body[:500].decode(errors="replace")
    reason = str(document.get("reason") or "")
    retry_after_s = _retry_after_s(document, headers)
    match status:
        case 401:
            return UnauthorizedError(status, reason, message)
        case 403:
            ends = any(cause.get("reason") == "NamespaceTerminating" for cause in _causes(document))
            return ForbiddenError(reason, message, namespace_terminating=ends)
        case 404:
            return NotFoundError(status, reason, message)
        case 409:
            return _conflict(document, reason, message)
        case 410:
            return GoneError(status, reason, message)
        case 422 if any(cause.get("field") == "metadata.uid" for cause in _causes(document)):
            # How an apply with a uid is answered when another object has the name.
            return PreconditionError(status, reason, message)
        case 400 | 422:
            return InvalidError(status, reason, message)
        case 429:
            return ThrottledError(status, reason, message, retry_after_s=retry_after_s)
        case 500 if _UNTYPED.match(message):
            return InvalidError(status, reason, message)
        case _ if status >= 500:
            return UnavailableError(status, reason, message, retry_after_s=retry_after_s)
    return KubeError(status, reason, message)


def _status_document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _causes(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    details = document.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []


def _conflict(document: Mapping[str, Any], reason: str, message: str) -> KubeError:
    if reason == "AlreadyExists":
        return AlreadyExistsError(409, reason, message)
    found = []
    for cause in _causes(document):
        if cause.get("reason") == "FieldManagerConflict":
            said = _MANAGER.search(str(cause.get("message", "")))
            found.append(FieldConflict(said[1] if said else "another manager", str(cause.get("field", ""))))
    return FieldConflictError(message, tuple(found)) if found else PreconditionError(409, reason, message)


def _retry_after_s(document: Mapping[str, Any], headers: Mapping[str, str]) -> float | None:
    details = document.get("details")
    said = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    try:
        return float(headers.get("Retry-After", said))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
