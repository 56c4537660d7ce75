from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncakectl.app import build_app
from mooncakectl.console import CommandError

GOOD = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: tiny}
spec:
  model: {name: m}
  engine: {type: Simulated, simulated: {profile: llama3-70b-8xa800, timeScale: 10}}
  prefillPools: [{name: prefill, replicas: 1}]
  decodePools: [{name: decode, replicas: 1}]
  scheduler: {admission: {mode: none}}
"""


@pytest.fixture
def run() -> CliRunner:
    return CliRunner()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture(autouse=True)
def nothing_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_valid_manifest_is_said_to_be_valid(run: CliRunner, manifest: Path) -> None:
    result = run.invoke(build_app(), ["validate", "-f", str(manifest)])
    assert result.exit_code == 0
    assert f"{manifest}: MooncakeCluster/tiny is valid" in result.output


def test_every_problem_of_every_file_is_told(run: CliRunner, manifest: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        GOOD.replace("replicas: 1", "replicas: many", 1).replace("model: {name: m}", "modell: {}")
    )
    command = ["validate", "-f", str(manifest), "-f", str(wrong), "--json"]
    result = run.invoke(build_app(), command)
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not told["valid"]
    assert told["objects"] == [{"file": str(manifest), "kind": "MooncakeCluster", "name": "tiny"}]
    problems = "\n".join(told["problems"])
    assert "spec.prefillPools[0].replicas" in problems
    assert "modell" in problems


def test_wrong_usage_exits_with_2(run: CliRunner) -> None:
    assert run.invoke(build_app(), ["validate"]).exit_code == 2
    assert run.invoke(build_app(), ["up", "-f", "x", "--port", "0"]).exit_code == 2
    assert run.invoke(build_app(), ["no-such-command"]).exit_code == 2


def test_the_version_and_every_command_are_told(run: CliRunner) -> None:
    assert run.invoke(build_app(), ["--version"]).output.startswith("mooncakectl ")
    told = run.invoke(build_app(), ["--help"]).output
    for command in ("up", "demo", "validate", "status", "explain", "drain"):
        assert command in told


def mooncakectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real program, for what runs an event loop of its own."""
    command = [sys.executable, "-m", "mooncakectl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_asking_without_a_cluster_says_what_to_do() -> None:
    result = mooncakectl("status")
    assert result.returncode == 1
    assert result.stderr.startswith("error: no cluster is up on this machine: `mooncakectl up -f FILE`")
    assert result.stderr.count("\n") == 1


def test_a_url_where_nobody_listens_is_named_without_a_traceback() -> None:
    result = mooncakectl("status", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert result.stderr.startswith("error: no answer from the scheduler's admin port at http://127.0.0.1:9:")
    assert result.stderr.count("\n") == 1


def test_a_manifest_without_a_cluster_cannot_be_brought_up(run: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n")
    result = run.invoke(build_app(), ["up", "-f", str(path)])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception) == f"{path}: no MooncakeCluster; add one"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            "auth: {apiKeySecretRef: {name: own}}",
            "spec.scheduler.auth.apiKeySecretRef: Secret own has no key keys.json; write {",
        ),
        (
            "redis: {secretRef: {name: own}}",
            "spec.scheduler.redis.secretRef: Secret own has no key url; write redis://",
        ),
    ],
)
def test_a_secret_without_the_key_that_is_asked_for_starts_nothing(
    manifest: Path, tmp_path: Path, reference: str, said: str
) -> None:
    manifest.write_text(GOOD.replace("admission: {mode: none}", f"admission: {{mode: none}}, {reference}"))
    (tmp_path / "secrets" / "own").mkdir(parents=True)
    (tmp_path / "secrets" / "own" / "alice").write_text("sk-alice")
    result = mooncakectl("up", "-f", str(manifest), "--secrets", str(tmp_path / "secrets"), "--no-table")
    assert result.returncode == 1
    assert f"error: {said}" in result.stderr
    assert "is ready" not in result.stderr


@pytest.mark.parametrize(
    ("command", "default"), [("up", "8000, or the next free one"), ("demo", "the engines' time scale")]
)
def test_the_help_tells_defaults_that_are_worked_out(run: CliRunner, command: str, default: str) -> None:
    told = run.invoke(build_app(), [command, "--help"], env={"COLUMNS": "200"}).output
    assert f"[default: ({default})]" in told


def test_the_help_tells_the_exit_codes(run: CliRunner) -> None:
    told = " ".join(run.invoke(build_app(), ["--help"]).output.split())
    assert "Exit codes: 0 done, 1 what stderr says, 2 wrong use, 130 interrupted." in told
