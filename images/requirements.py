"""Print the part of requirements.lock that the wheel needs with some of its extras.

Usage: ``python images/requirements.py EXTRA… < requirements.lock``, in the folder of pyproject.toml;
``--build`` instead of extras prints what building the wheel needs.

pip can check hashes only of requirements that are pinned one by one, and the lock also pins what other
extras and the developers need. The lock says of each package who needs it ("via"), which is followed from
the roots that pyproject.toml names.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==")
_VIA = re.compile(r"^\s+#\s+(?:via\s+)?([A-Za-z0-9._-]+)")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def roots(project: dict[str, Any], extras: list[str]) -> set[str]:
    """Names of what the project itself requires."""
    optional = project["optional-dependencies"]
    if unknown := sorted(set(extras) - set(optional)):
        raise SystemExit(
            f"pyproject.toml has no extra {', '.join(unknown)}; it has {', '.join(sorted(optional))}"
        )
    return names([*project["dependencies"], *(line for extra in extras for line in optional[extra])])


def names(requirements: list[str]) -> set[str]:
    """Names in a list of requirements such as ``redis>=6,<9``."""
    return {_normal(found.group()) for line in requirements if (found := _NAME.match(line))}


def blocks(lock: str) -> dict[str, tuple[str, set[str]]]:
    """Each package's lines in the lock, and who needs it."""
    found: dict[str, tuple[str, set[str]]] = {}
    name = ""
    for line in lock.splitlines(keepends=True):
        if pin := _PIN.match(line):
            name = _normal(pin.group(1))
            found[name] = (line, set())
        elif name and (via := _VIA.match(line)):
            found[name][1].add(_normal(via.group(1)))
        elif name and line.strip() != "# via":
            found[name] = (found[name][0] + line, found[name][1])
    return found


def closure(packages: dict[str, tuple[str, set[str]]], start: set[str]) -> list[str]:
    """The roots and all that they need, directly or not."""
    needed = start & packages.keys()
    while more := {name for name, (_, via) in packages.items() if via & needed} - needed:
        needed |= more
    return sorted(needed)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    pinned = blocks(sys.stdin.read())
    declared = tomllib.loads(Path("pyproject.toml").read_text())
    if sys.argv[1:] == ["--build"]:
        start = names(declared["build-system"]["requires"])
    else:
        start = roots(declared["project"], sys.argv[1:])
    for package in closure(pinned, start):
        sys.stdout.write(pinned[package][0])
