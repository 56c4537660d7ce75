"""docs/peers-problems.md and docs/faults.md name tests that exist, and leave no entry out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`([\w/]+\.py)(?:::(test_\w+))?`")
FAULT = re.compile(r"`(?:([\w/]+\.py)(?:::)?|::)?(test_\w+)?`")
"""A file, a test of it, or another test of the file that was named last."""


def rows() -> list[tuple[int, str, str, str]]:
    lines = (ROOT / "docs" / "peers-problems.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [(int(row[0]), row[1], row[2], row[3]) for row in cells if row[0].isdecimal()]


@cache
def functions_in(file: Path) -> frozenset[str]:
    tree = ast.walk(ast.parse(file.read_text()))
    functions = (node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions)


def file_of(path: str) -> Path:
    if path.startswith("e2e/"):
        return ROOT / path
    return ROOT / "tests" / re.sub(r"^operator/", "integration/operator/", path)


def test_every_one_of_the_49_is_there_once() -> None:
    assert [number for number, *_ in rows()] == list(range(1, 50))


@pytest.mark.parametrize(("number", "trouble", "must", "held_by"), rows())
def test_each_is_held_by_tests_that_exist_or_says_why_not(
    number: int, trouble: str, must: str, held_by: str
) -> None:
    assert re.search(r"\([\w.-]+/[\w.-]+#\d+\)", trouble), "the public issue is named"
    if held_by.startswith(("later: ", "does not apply: ")):
        assert len(held_by) > 40
        return
    assert must
    named = NAMED.findall(held_by)
    assert named
    for path, test in named:
        file = file_of(path)
        assert file.is_file(), path
        assert not test or test in functions_in(file), f"{path}::{test}"


def test_the_26_faults_of_other_routers_are_held_by_tests_that_exist() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == list(range(1, 27))
    file, tests = ROOT, 0
    for path, test in FAULT.findall(page):
        if path:
            file = ROOT / "tests" / re.sub(r"^faults/", "integration/faults/", path)
            assert file.is_file(), path
        if test:
            tests += 1
            assert test in functions_in(file), f"{file.name}::{test}"
    assert tests > 50
