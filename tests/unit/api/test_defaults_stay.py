"""A default is part of every object that the API server has stored: it may be added, never changed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mooncake_core.api import KINDS
from mooncake_core.api.crds import definition

RECORDED = Path(__file__).with_name("defaults_of_v1alpha1.json")


def defaults(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values that the API server fills in, by path; nested objects are gone through."""
    for name, below in (schema.get("properties") or {}).items():
        here = f"{path}.{name}" if path else name
        if "default" in below and not isinstance(below["default"], dict | list):
            yield here, below["default"]
        yield from defaults(below, here)
    if "items" in schema:
        yield from defaults(schema["items"], f"{path}[]")


def of(kind: str) -> dict[str, Any]:
    (version,) = definition(kind)["spec"]["versions"]
    return dict(defaults(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))


def test_no_default_has_changed_since_it_was_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert recorded.keys() == set(KINDS)
    for kind, fields in recorded.items():
        present = of(kind)
        assert {path: present.get(path, "gone") for path in fields} == fields


def test_every_default_is_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    for kind in KINDS:
        assert of(kind).keys() == recorded[kind].keys(), f"{kind}: write down what is new, as released"
