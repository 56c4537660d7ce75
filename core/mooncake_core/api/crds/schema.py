"""From a pydantic model to a structural OpenAPI schema with the model's rules as CEL.

Source: Kubernetes, "Extend the Kubernetes API with CustomResourceDefinitions", sections Specifying a
structural schema, Validation rules and Defaulting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from mooncake_core.api.base import WRITE, ApiModel, Rule

Schema: TypeAlias = dict[str, Any]

_MEANINGLESS = ("title", "$defs", "additionalProperties", "x-any-object", "x-map-keys", WRITE)
_UNION_WITH_TEXT = {"integer", "string"}


class _WithRules(GenerateJsonSchema):
    """Pydantic's generator, which also writes down rules and the defaults of lists and nested objects."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        model = schema["cls"]
        if not issubclass(model, ApiModel):
            return json_schema
        if rules := [validation(rule) for rule in (*model.RULES, *model.SERVER_RULES)]:
            json_schema["x-kubernetes-validations"] = rules
        for name, field in model.model_fields.items():
            if field.default_factory is None:
                continue
            default = field.get_default(call_default_factory=True)
            # In full: the API server holds a default against the rules before it fills in what is nested.
            full = default.manifest() if isinstance(default, ApiModel) else default
            json_schema["properties"][field.alias or name]["default"] = full
        return json_schema


def validation(rule: Rule) -> Schema:
    """One entry of `x-kubernetes-validations`."""
    entry: Schema = {"rule": rule.cel, "message": rule.message}
    return entry | {"fieldPath": f".{rule.at}"} if rule.at else entry


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's schema as a CustomResourceDefinition may contain it: no references, no unions, no nulls."""
    generated = model.model_json_schema(by_alias=True, schema_generator=_WithRules)
    return _structural(generated, generated.get("$defs", {}))


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    flat = _without_references(schema, definitions)
    if flat.get("x-any-object"):
        kept: Schema = {key: flat[key] for key in ("description", "default") if key in flat}
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, **kept}
    result: Schema = {}
    for key, value in flat.items():
        if key == "const":
            result["enum"] = [value]
        elif key == "properties":
            result[key] = {name: _structural(member, definitions) for name, member in value.items()}
        elif key == "items":
            result[key] = _structural(value, definitions)
        elif key == "description":
            result[key] = " ".join(str(value).split())
        elif key not in _MEANINGLESS and not (key == "default" and value is None):
            result[key] = value
    if "pattern" in result and WRITE in flat:
        # The API server shows a pattern as it is; a rule says what to write.
        pattern = result.pop("pattern")
        entry = {"rule": f"self.matches(r'{pattern}')", "message": f"is not valid; write {flat[WRITE]}"}
        result["x-kubernetes-validations"] = [*result.get("x-kubernetes-validations", []), entry]
    if result.get("type") == "array":
        result |= _list_type(flat)
    if result.get("type") == "object" and isinstance(flat.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _structural(flat["additionalProperties"], definitions)
    return result


def _without_references(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Follow `$ref`, take what an optional field is when it is there; outer descriptions and defaults win."""
    outer = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "allOf")}
    if "$ref" in schema:
        inner = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return {**_without_references(inner, definitions), **outer}
    members = [member for member in schema.get("anyOf", []) if member.get("type") != "null"]
    if not members:
        return outer
    if len(members) == 1:
        return {**_without_references(members[0], definitions), **outer}
    resolved = [_without_references(member, definitions) for member in members]
    if {member.get("type") for member in resolved} != _UNION_WITH_TEXT:
        raise TypeError(f"a CustomResourceDefinition cannot say {schema.get('anyOf')}")
    return {"x-kubernetes-int-or-string": True, **outer}


def _list_type(flat: Mapping[str, Any]) -> Schema:
    if keys := flat.get("x-map-keys"):
        return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(cast(list[str], keys))}
    return {"x-kubernetes-list-type": "atomic"}
