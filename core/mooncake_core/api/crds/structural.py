"""The API server's rules for structural schemas, and our own: everything is bounded.

Source: Kubernetes, "Specifying a structural schema"; the bounds keep the estimated cost of CEL rules low.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ALLOWED = frozenset(
    {
        "additionalProperties",
        "default",
        "description",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "nullable",
        "pattern",
        "properties",
        "required",
        "type",
        "uniqueItems",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type",
        "x-kubernetes-map-type",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-validations",
    }
)
_TYPES = frozenset({"array", "boolean", "integer", "number", "object", "string"})


def violations(schema: Mapping[str, Any], path: str = "openAPIV3Schema") -> Iterator[str]:
    """Places where a schema is not structural, or has no bound."""
    for key in sorted(schema.keys() - _ALLOWED):
        yield f"{path}: {key} is not allowed"
    if schema.get("x-kubernetes-int-or-string"):
        if "type" in schema:
            yield f"{path}: int-or-string must have no type"
        return
    if schema.get("type") not in _TYPES:
        yield f"{path}: type is missing or unknown"
    yield from _object_violations(schema, path)
    yield from _list_violations(schema, path)
    # The root's type and version are the API server's own.
    of_root = path.count(".") == 1 and path.endswith((".apiVersion", ".kind"))
    if schema.get("type") == "string" and not of_root and not {"maxLength", "enum", "format"} & schema.keys():
        yield f"{path}: a string without maxLength"
    for rule in schema.get("x-kubernetes-validations", []):
        if not rule.get("rule") or not rule.get("message") or "\n" in rule["message"]:
            yield f"{path}: a rule needs a message of one line"


def _object_violations(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    if properties and "additionalProperties" in schema:
        yield f"{path}: properties and additionalProperties exclude each other"
    for name in schema.get("required", []):
        if name not in properties:
            yield f"{path}: requires {name}, which it does not describe"
    for name, member in properties.items():
        yield from violations(member, f"{path}.{name}")
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from violations(schema["additionalProperties"], f"{path}.*")
        if "maxProperties" not in schema:
            yield f"{path}: a mapping without maxProperties"


def _list_violations(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if schema.get("type") != "array":
        return
    items = schema.get("items")
    if not isinstance(items, Mapping):
        yield f"{path}: items are not described"
        return
    if "maxItems" not in schema:
        yield f"{path}: a list without maxItems"
    if "x-kubernetes-list-type" not in schema:
        yield f"{path}: a list without x-kubernetes-list-type"
    for key in schema.get("x-kubernetes-list-map-keys", []):
        member = items.get("properties", {}).get(key, {})
        if key not in items.get("required", []) and "default" not in member:
            yield f"{path}: map key {key} is neither required nor has a default"
    yield from violations(items, f"{path}[]")
