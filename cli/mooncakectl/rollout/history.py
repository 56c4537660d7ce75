"""The history of a spec: what each revision changed, and going back to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_operator.control.reading import read_cluster, read_pool
from mooncake_operator.kube.resources import CLUSTER, Object
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.spec_revisions import CAUSE, SPEC_LABEL, essential, identity, undone
from mooncakectl.console import CommandError
from mooncakectl.rollout.target import Target


@dataclass(frozen=True, slots=True)
class Record:
    """One revision of a spec."""

    number: int
    created: str
    cause: str
    spec: Object
    changes: tuple[str, ...]
    """Paths in which it differs from the one before."""
    present: bool = False
    """Whether it is what the object asks for now."""

    def document(self, *, with_spec: bool = False) -> Object:
        """For programs."""
        told: Object = {
            "revision": self.number,
            "created": self.created,
            "cause": self.cause or None,
            "changes": list(self.changes),
            "present": self.present,
        }
        return told | ({"spec": self.spec} if with_spec else {})


async def records(target: Target) -> list[Record]:
    """All revisions on record, oldest first.

    Raises:
        CommandError: there are none.
    """
    target.must_be_its_own("history")
    kept = [r for r in await target.revisions() if SPEC_LABEL in (r["metadata"].get("labels") or {})]
    if not kept:
        raise CommandError(
            f"{target.name} has no history yet: an operator records it with its first pass; is one running?"
        )
    kept.sort(key=lambda revision: int(revision["revision"]))
    present = _present_identity(target)
    found: list[Record] = []
    for revision in kept:
        spec = revision["data"]["spec"]
        before = found[-1].spec if found else None
        found.append(
            Record(
                number=int(revision["revision"]),
                created=revision["metadata"]["creationTimestamp"],
                cause=(revision["metadata"].get("annotations") or {}).get(CAUSE, ""),
                spec=spec,
                changes=tuple(differences(essential(before), essential(spec))) if before is not None else (),
                present=revision["metadata"]["labels"][SPEC_LABEL] == present,
            )
        )
    return found


def chosen(found: Sequence[Record], number: int) -> Record:
    """The revision to go back to: the one of that number, or with 0 the last that is not the present one.

    Raises:
        CommandError: there is none; names those there are.
    """
    numbers = ", ".join(str(record.number) for record in found)
    if number:
        for record in found:
            if record.number == number:
                return record
        raise CommandError(f"there is no revision {number}; on record are {numbers}")
    earlier = [record for record in found if not record.present]
    if not earlier:
        raise CommandError(f"there is nothing to go back to: the only revision on record is {numbers}")
    return earlier[-1]


async def go_back(target: Target, number: int) -> tuple[Record, list[str]]:
    """Write an earlier spec; returns its revision and the paths that changed.

    Raises:
        CommandError: there is no such revision, or the API server refuses it.
    """
    target.must_be_its_own("undo")
    record = chosen(await records(target), number)
    changes = list(differences(target.live["spec"], undone(target.live["spec"], record.spec)))
    if changes:
        await target.change(lambda present: undone(present, record.spec))
    return record, changes


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths at which two specs differ, as a user would write them; entries of pools by name."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for field in sorted(before.keys() | after.keys()):
            yield from differences(before.get(field), after.get(field), f"{path}.{field}".lstrip("."))
    elif _is_named(before) and _is_named(after):
        old, new = ({entry["name"]: entry for entry in entries} for entries in (before, after))
        for name in sorted(old.keys() | new.keys()):
            yield from differences(old.get(name), new.get(name), f"{path}[{name}]")
    elif before != after:
        yield path


def _present_identity(target: Target) -> str:
    """Of the live spec; empty = it cannot be read, hence is none of those on record."""
    read = read_cluster(target.live) if target.resource is CLUSTER else read_pool(target.live)
    return "" if isinstance(read, Finding) else identity(read.spec)


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value)
