"""bench-sim's own workings, on traces of a few requests: what it finds there means nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_simulator.workloads import generate, write_trace

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulator"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for seed, name in enumerate(("conversation", "synthetic")):
        write_trace(folder / f"{name}_trace.jsonl", generate(40, seed))
    return folder


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def test_the_last_line_has_every_row_and_the_exit_code_says_whether_all_hold(
    traces: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "found.json"
    kept.write_text(json.dumps({"coupled": {"seeds": 5, "rows": []}}))
    ran = _run("--traces", traces, "--only", "hit-*,low-load", "--seeds", 2, "--jobs", 2, "--json", kept)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert len(told["rows"]) == 8 + 10
    assert told["seconds_12031_requests"] is None
    for row in told["rows"]:
        assert row["kind"] in {"reproduce", "goal"}
        assert isinstance(row["holds"], bool)
        if row["range"] is not None and "/" not in row["name"]:
            low, high = row["range"]
            assert low <= row["ours"] <= high
    # Published hit rates are not those of this trace.
    assert ran.returncode == 1
    groups = json.loads(kept.read_text())
    assert list(groups) == ["hit-rates", "coupled", "low-load"]
    assert groups["low-load"]["seeds"] == 2


def test_the_figures_do_not_depend_on_how_many_processes_simulate(traces: Path) -> None:
    told = []
    for jobs in (1, 2):
        ran = _run("--traces", traces, "--only", "placement", "--seeds", 2, "--jobs", jobs)
        told.append(json.loads(ran.stdout.splitlines()[-1]))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "hits"], "--only hits: write some of hit-rates"),
        (["--traces", "nowhere"], "nowhere: no such folder: name the one of the published traces"),
        (
            ["--traces", SCRIPT],
            "conversation_trace.jsonl and synthetic_trace.jsonl not there: name the folder",
        ),
        (["--seeds", 0], "--seeds 0: write 1 or more"),
        (["--jobs", -1], "--jobs -1: write 1 or more"),
    ],
)
def test_what_it_cannot_run_it_says(arguments: list[object], said: str) -> None:
    ran = _run(*arguments)
    assert ran.returncode
    assert said in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
