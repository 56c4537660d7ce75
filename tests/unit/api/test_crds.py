from pathlib import Path

import pytest

from mooncake_core.api import KINDS
from mooncake_core.api.base import ApiModel
from mooncake_core.api.crds import definition, definitions, differences, violations, write
from mooncake_core.api.crds.__main__ import main

COMMITTED = Path(__file__).parents[3] / "crds"


def schema_of(kind):
    return definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def models_below(model, seen=None):
    """All models that a kind consists of."""
    seen = {} if seen is None else seen
    if model in seen:
        return seen
    seen[model] = True
    for field in model.model_fields.values():
        for part in parts_of(field.annotation):
            if isinstance(part, type) and issubclass(part, ApiModel):
                models_below(part, seen)
    return seen


def parts_of(annotation):
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(part for item in inner for part in parts_of(item))]


def test_the_committed_files_are_what_the_models_say():
    assert differences(COMMITTED) == []


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_structural_and_everything_in_them_is_bounded(kind):
    assert list(violations(schema_of(kind))) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_of_the_models_reaches_the_api_server(kind):
    written = all_values(schema_of(kind))
    for model in models_below(KINDS[kind]):
        for rule in (*model.RULES, *model.SERVER_RULES):
            assert {rule.cel, rule.message} <= written


def all_values(document):
    if isinstance(document, dict):
        return {text for value in document.values() for text in all_values(value)}
    if isinstance(document, list):
        return {text for value in document for text in all_values(value)}
    return {document}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_given_in_full_because_rules_see_them_before_nested_ones_are_filled_in(kind):
    def check(schema, path):
        for name, member in schema.get("properties", {}).items():
            default = member.get("default")
            if isinstance(default, dict):
                given = {key for key, inner in member.get("properties", {}).items() if "default" in inner}
                assert given <= default.keys(), f"{path}.{name}"
            check(member, f"{path}.{name}")
        if "items" in schema:
            check(schema["items"], f"{path}[]")

    check(schema_of(kind), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_finds_every_kind_by_short_name_and_category(kind):
    names = definition(kind)["spec"]["names"]
    assert names["categories"] == ["mooncake"]
    assert len(names["shortNames"]) == 1


def test_short_names_are_unique():
    short = [document["spec"]["names"]["shortNames"][0] for document in definitions().values()]
    assert sorted(short) == ["mkc", "mkdp", "mkkv", "mkpp"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MooncakeCluster"])
def test_pools_can_be_scaled_and_their_replicas_are_never_absent(kind):
    subresources = definition(kind)["spec"]["versions"][0]["subresources"]
    assert subresources["scale"]["specReplicasPath"] == ".spec.replicas"
    assert "status" in subresources
    assert schema_of(kind)["properties"]["spec"]["properties"]["replicas"]["default"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_printer_columns_point_at_fields_that_exist(kind):
    root = schema_of(kind)
    for column in definition(kind)["spec"]["versions"][0]["additionalPrinterColumns"]:
        schema = root
        for step in column["jsonPath"].removeprefix(".").split("[?")[0].split("."):
            if step in ("metadata", "creationTimestamp"):
                break
            assert step in schema["properties"], column
            schema = schema["properties"][step]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/x"}}}, "$ref is not allowed"),
        ({"type": "object", "properties": {"a": {"anyOf": []}}}, "anyOf is not allowed"),
        ({"type": "object", "properties": {"a": {}}}, "type is missing"),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, "a string without maxLength"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
            "a list without maxItems",
        ),
        ({"type": "object", "required": ["b"]}, "requires b, which it does not describe"),
        (
            {
                "type": "array",
                "maxItems": 2,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}},
            },
            "map key name is neither required nor has a default",
        ),
    ],
)
def test_the_checker_finds_what_an_api_server_would_refuse(schema, expected):
    assert any(expected in found for found in violations(schema))


def test_writing_twice_changes_nothing_and_stale_kinds_are_removed(tmp_path: Path):
    stale = tmp_path / "mooncakeoldthings.yaml"
    stale.write_text("")
    write(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert stale.name not in first
    write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_the_command_says_what_differs_and_how_to_mend_it(tmp_path: Path, capsys):
    assert main(["--write", str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    changed = tmp_path / "mooncakeclusters.yaml"
    changed.write_text(changed.read_text().replace("mkc", "mk"))
    (tmp_path / "mooncakedecodepools.yaml").unlink()
    (tmp_path / "other.yaml").write_text("")
    capsys.readouterr()
    assert main(["--check", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "mooncakeclusters.yaml: differs from the models" in said
    assert "mooncakedecodepools.yaml: is missing" in said
    assert "other.yaml: no model has this kind" in said
    assert "make crds" in said
