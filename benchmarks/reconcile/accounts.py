"""Who called the API server how often (its audit log), and what processes cost (`/proc`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: Metadata
"""
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _User(msgspec.Struct):
    username: str = ""


class _Reference(msgspec.Struct):
    resource: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""


class _Entry(msgspec.Struct):
    verb: str
    user: _User = msgspec.field(default_factory=_User)
    objectRef: _Reference = msgspec.field(default_factory=_Reference)


@dataclass(frozen=True, slots=True)
class Call:
    """One finished request."""

    user: str
    verb: str
    resource: str
    name: str = ""

    @property
    def writes(self) -> bool:
        """Whether it may change something. Leases are how one is known to live, not work."""
        return self.verb in WRITES and self.resource != "leases"


class AuditLog:
    """The API server's audit log, read on from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = msgspec.json.Decoder(_Entry)

    def news(self) -> list[Call]:
        """Calls written since the last time; the server writes them some seconds late."""
        return list(self._read())

    def _read(self) -> Iterator[Call]:
        with self._path.open("rb") as log:
            log.seek(self._offset)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                entry = self._decoder.decode(line)
                ref = entry.objectRef
                resource = "/".join(filter(None, (ref.resource, ref.subresource)))
                yield Call(entry.user.username, entry.verb, resource, ref.name)


def counted(calls: list[Call]) -> Counter[str]:
    """Calls by verb and resource."""
    return Counter(f"{call.verb} {call.resource}" for call in calls)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process, and those it started, have used so far."""

    cpu_s: float
    rss_bytes: int
    peak_bytes: int


def usage_of(pid: int, *, with_children: bool = True) -> Usage:
    """Of a process, and of its children; zeros once it has ended."""
    total = Usage(0.0, 0, 0)
    for one in (pid, *(_children(pid) if with_children else ())):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{one}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks = int(fields[11]) + int(fields[12])
        peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
        total = Usage(
            total.cpu_s + ticks / _TICKS,
            total.rss_bytes + int(fields[21]) * _PAGE_BYTES,
            total.peak_bytes + peak * 1024,
        )
    return total


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in found:
            yield child
            yield from _children(child)


def find_programs(mark: str) -> dict[str, int]:
    """Process ids of a cluster's programs, by name; told from others by a mark in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark.encode() in environment:
            found[Path(command[0].decode()).name] = int(folder.name)
    return found
