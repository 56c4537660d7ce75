"""docs/evaluation.md: made from rows and text, and honest about what falls short."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulator" / "page.py"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluation_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(name: str, **changed: Any) -> dict[str, Any]:
    row = {
        "name": name, "kind": "goal", "expected": "≤ 0.80", "ours": 0.6, "holds": True,
        "range": [0.55, 0.7], "setup": "8P8D 2×",
    }  # fmt: skip
    return row | changed


def _group(*rows: dict[str, Any], seeds: int = 5) -> dict[str, Any]:
    return {"seeds": seeds, "rows": list(rows)}


def test_a_row_tells_what_was_expected_what_was_found_and_how_far_the_seeds_lie_apart(
    writer: ModuleType,
) -> None:
    text = writer.page("{{rows load}}", {"load": _group(_row("mean TTFT"))}, {})
    assert "| mean TTFT | ≤ 0.80 | 0.600 | 0.550 – 0.700 | -25.0 % | yes, a goal |" in text
    assert "Set-up (medians of 5 seeds, ties at random): 8P8D 2×." in text


def test_what_falls_short_is_told_twice_with_its_reason_or_that_there_is_none(writer: ModuleType) -> None:
    found = {"load": _group(_row("mean TTFT, 8P", holds=False, ours=0.9), _row("P99", holds=False))}
    text = writer.page("{{missed}}\n{{rows load}}", found, {"mean TTFT, *": "The order is missing."})
    assert "- mean TTFT, 8P: 0.900 where ≤ 0.80 was expected. The order is missing." in text
    assert "- mean TTFT, 8P: The order is missing." in text
    assert "- P99: Not explained yet." in text


def test_one_reason_of_several_rows_is_told_once(writer: ModuleType) -> None:
    found = {"load": _group(_row("a", holds=False), _row("b"), _row("c", holds=False))}
    text = writer.page("{{rows load}}", found, {"*": "One reason."})
    assert "- a; c: One reason." in text
    assert text.count("One reason.") == 1


def test_rows_that_are_told_and_not_judged_count_for_nothing(writer: ModuleType) -> None:
    found = {
        "told": _group(_row("refused", kind="report", holds=True)),
        "judged": _group(_row("a"), _row("b", holds=False), _row("c", kind="reproduce")),
    }
    text = writer.page("{{summary}}", found, {})
    assert "| figures of the papers | 1 | 1 |" in text
    assert "| goals beyond them | 2 | 1 |" in text


def test_a_group_without_a_place_comes_last_and_a_place_without_rows_says_so(writer: ModuleType) -> None:
    text = writer.page("{{rows here}}\nend\n", {"low-load": _group(_row("mean TTFT"))}, {})
    assert text.startswith("*Not run for this page.*\nend\n")
    assert "## Low load\n\n| row |" in text


def test_the_page_in_the_repository_is_what_its_rows_and_its_text_make() -> None:
    ran = subprocess.run([sys.executable, "-P", SCRIPT, "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
