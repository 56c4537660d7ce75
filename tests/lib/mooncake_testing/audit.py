"""Who asked the API server for what: its audit log, compared with what roles grant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Right(NamedTuple):
    """What RBAC grants one by one."""

    group: str
    resource: str
    """With its subresource: `pods/status`."""
    verb: str


class AuditLog:
    """The log of one API server."""

    def __init__(self, directory: Path) -> None:
        """Write the policy; what the API server needs to know is in `arguments`."""
        self._path = directory / "audit.log"
        policy = directory / "audit-policy.yaml"
        document = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            # A watch is complete only when it ends.
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        policy.write_text(yaml.safe_dump(document))
        self.arguments = (f"--audit-policy-file={policy}", f"--audit-log-path={self._path}")

    def used(self, user: str) -> set[Right]:
        """Rights that a user has made use of."""
        return {right for entry in self._of(user) for right in _rights(entry)}

    def refused(self, user: str) -> list[str]:
        """What a user has no right to; not what a quota, or a namespace that ends, forbids to everybody."""
        return sorted(
            {
                f"{entry['verb']} {entry['requestURI']}: {entry['responseStatus'].get('message', '')}"
                for entry in self._of(user)
                if _lacks_a_right(entry)
            }
        )

    def _of(self, user: str) -> Iterator[Mapping[str, Any]]:
        for line in self._path.read_text().splitlines():
            entry = json.loads(line)
            if entry["user"].get("username") == user and "objectRef" in entry:
                yield entry


def granted(roles: Iterable[Mapping[str, Any]]) -> set[Right]:
    """Rights of some roles."""
    return {
        Right(group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _lacks_a_right(entry: Mapping[str, Any]) -> bool:
    refused = entry.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
    # Said by an admission plugin that asks for rights of its own.
    return refused or "cannot set blockOwnerDeletion" in entry.get("responseStatus", {}).get("message", "")


def _rights(entry: Mapping[str, Any]) -> Iterator[Right]:
    about = entry["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource", ""))))
    group = about.get("apiGroup", "")
    yield Right(group, resource, entry["verb"])
    # Server-side apply of what is not there: the API server asks whether it may be created.
    if entry["verb"] == "patch" and entry.get("responseStatus", {}).get("code") == 201:
        yield Right(group, resource, "create")
