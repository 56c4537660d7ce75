import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_simulator.workloads import read_trace
from mooncakectl.app import build_app


@pytest.fixture
def workload() -> object:
    app = build_app()

    def invoke(*arguments: str) -> object:
        return CliRunner().invoke(app, ["workload", *arguments])

    return invoke


def test_a_generated_workload_is_the_one_of_its_seed_and_is_described(tmp_path: Path, workload) -> None:  # type: ignore[no-untyped-def]
    arguments = ["--sessions", "20", "--turns", "3", "--gap", "lognormal:60s:1.0", "--seed", "5"]
    for name in ("one", "two"):
        result = workload("generate", *arguments, "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert "token hit rate" in result.output

    stats = workload("stats", str(tmp_path / "one"), "--capacity", "10", "--json", str(tmp_path / "s"))
    assert stats.exit_code == 0, stats.output
    numbers = json.loads((tmp_path / "s").read_bytes())
    assert numbers["requests"] == len(read_trace(tmp_path / "one"))
    assert 0.3 < numbers["token_hit_rate"] < 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--gap", "soon"], "--gap: distribution 'soon'"),
        (["generate", "--arrival", "never"], "--arrival never: expected one of poisson, uniform, burst"),
        (["generate", "--rate", "0"], "more than 0"),
        (["stats", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    tmp_path: Path,
    workload,  # type: ignore[no-untyped-def]
    arguments: list[str],
    told: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = ["--out", str(tmp_path / "t")] if arguments[0] == "generate" else []
    result = workload(*arguments, *out)
    assert result.exit_code == 1
    assert told in result.output + capfd.readouterr().err
