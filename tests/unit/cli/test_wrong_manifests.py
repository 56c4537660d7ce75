"""`mooncakectl validate` refuses what the API server refuses, in the same words."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from mooncake_testing.wrong_manifests import cluster, wrong_manifests
from mooncakectl.app import build_app

WRONG = list(wrong_manifests())


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """What the command says of each manifest, all of them in one run."""
    folder = tmp_path_factory.mktemp("wrong")
    for position, wrong in enumerate(WRONG):
        (folder / f"{position:03}.yaml").write_text(yaml.safe_dump(wrong.manifest))
    result = CliRunner().invoke(build_app(), ["validate", "-f", str(folder), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)["problems"]
    return {
        wrong.name: [line for line in found if f"/{position:03}.yaml: " in line]
        for position, wrong in enumerate(WRONG)
    }


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_it_is_refused_with_the_field_and_what_to_write(wrong, complaints):
    found = complaints[wrong.name]
    assert any(f": {wrong.field}" in line and wrong.words in line for line in found), found


def test_without_the_mistakes_it_is_taken(tmp_path):
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(cluster()))
    assert CliRunner().invoke(build_app(), ["validate", "-f", str(tmp_path)]).exit_code == 0
