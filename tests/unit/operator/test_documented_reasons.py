"""docs/conditions.md and the code know the same conditions and reasons."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mooncake_operator
from mooncake_operator.planning import reasons

SOURCES = sorted(Path(mooncake_operator.__file__).parent.rglob("*.py"))
DOCUMENT = Path(__file__).parents[3] / "docs" / "conditions.md"
REASONS = {
    name: value
    for name, value in vars(reasons).items()
    if name.isupper() and isinstance(value, str) and name != "GATE"
}
WHERE_A_REASON_STANDS = {"Verdict": 2, "condition": 2, "Finding": 0, "WaitFor": 0, "record": 1, "_unknown": 0}


def documented() -> list[str]:
    """First cells of the document's tables."""
    return re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE)


def calls() -> Iterator[tuple[str, ast.Call]]:
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                yield name, node


def condition_types() -> set[str]:
    """Literal types of all conditions that are made somewhere."""
    made = (call.args[0] for name, call in calls() if name in ("Verdict", "condition") and call.args)
    return {node.value for node in made if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_reason_and_condition_is_documented_once_and_none_that_is_no_more() -> None:
    found = documented()
    assert sorted(found) == sorted({*REASONS.values(), *condition_types()})


def test_every_condition_that_the_api_promises_is_made() -> None:
    promised = {"Available", "Progressing", "Degraded", "FabricReady", "Scheduled", "MasterReady"}
    promised |= {"CapacityReady", "Ready", "SchedulerReady", "RatioSatisfied", "SLOMet"}
    assert condition_types() == promised


def test_no_reason_is_written_beside_the_list_of_them() -> None:
    literal = [
        f"{name}: {ast.unparse(call)}"
        for name, call in calls()
        if (place := WHERE_A_REASON_STANDS.get(name)) is not None
        and len(call.args) > place
        and isinstance(call.args[place], ast.Constant)
    ]
    assert literal == []


def test_every_reason_is_given_somewhere() -> None:
    used = {
        node.attr
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "reasons"
    }
    assert sorted(REASONS.keys() - used) == []


def test_two_reasons_are_never_spelt_the_same() -> None:
    assert len(set(REASONS.values())) == len(REASONS)
