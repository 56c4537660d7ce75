"""`mooncakectl simulate` as people and machines use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_simulator.workloads import Request, write_trace
from mooncakectl.app import build_app

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [
        Request(
            timestamp_ms=400.0 * at,
            input_length=4_000,
            output_length=100,
            hash_ids=(1, 2, 3, 4, *range(100 * at, 100 * at + 4)),
        )
        for at in range(1, 60)
    ]
    write_trace(path, requests)
    return path


def _run(*arguments: object) -> tuple[int, str, str]:
    ran = CliRunner().invoke(build_app(), ["simulate", *map(str, arguments)])
    return ran.exit_code, ran.stdout, ran.stderr


def test_every_combination_is_a_run_with_the_same_requests(trace: Path) -> None:
    code, printed, _ = _run(
        "-f", QUICKSTART, "--trace", trace, "--policy", "kv-centric,random", "--admission", "none,predictive",
        "--speed", "1,2", "--sweep", "prefill=1..3", "--json",
    )  # fmt: skip
    assert code == 0
    runs = json.loads(printed)["runs"]
    assert len(runs) == 2 * 2 * 2 * 3
    assert {(run["prefill"], run["decode"]) for run in runs} == {(1, 3), (2, 2), (3, 1)}
    for run in runs:
        assert run["completed"] + run["refused"] == run["requests"] == 59
        assert 0 <= run["goodput"] <= 1
        # Four blocks of each prompt are shared by all: the first request computes them, the store keeps them.
        assert run["token_hit_rate"] <= 4 * 512 / 4_000
    reused = [run["token_hit_rate"] for run in runs if run["policy"] == "kv-centric"]
    assert min(reused) > 0.4


def test_the_table_shows_what_is_compared_and_names_the_rest_once(trace: Path) -> None:
    code, printed, _ = _run("-f", QUICKSTART, "--trace", trace, "--policy", "kv-centric,cache-aware")
    assert code == 0
    assert "policy" in printed
    assert "cache-aware" in printed
    assert "2+2 · llama3-70b-8xa800 · 1× · predictive · 1 seed" in printed


def test_hardware_is_compared_and_what_stands_for_real_engines_is_told(trace: Path, tmp_path: Path) -> None:
    kinds = "llama3-70b-8xa800,llama3-70b-8xh200"
    code, printed, told = _run("-f", QUICKSTART, "--trace", trace, "--profile", kinds, "--json")
    assert (code, told) == (0, "")
    runs = json.loads(printed)["runs"]
    assert [run["profile"] for run in runs] == kinds.split(",")
    assert runs[1]["ttft_mean_s"] < runs[0]["ttft_mean_s"]
    simulated = "    simulated:\n      profile: llama3-70b-8xa800\n      timeScale: 10\n"
    real, four = tmp_path / "real.yaml", "resources: {gpu: {count: 4}}, instance: {parallelism: {tensor: 4}}"
    text = (
        QUICKSTART.read_text().replace(simulated, "").replace("type: Simulated", "type: vLLM\n    image: i")
    )
    real.write_text(text.replace("- name: prefill\n    replicas: 2", f"- {{name: p, replicas: 2, {four}}}"))
    code, printed, told = _run("-f", real, "--trace", trace)
    assert code == 0
    assert "llama3-70b-8xa800 · 1×" in printed
    assert "no manifest tells how fast real engines are: simulated with llama3-70b-8xa800" in told
    assert "resources.gpu.count is 4: such a Pod is simulated as the 8 GPUs" in told
    code, _, told = _run("-f", real, "--trace", trace, "--profile", "qwen3-32b-4xh200")
    assert (code, told) == (0, "")


def test_what_of_a_manifest_is_not_simulated_is_told(trace: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "cluster.yaml"
    policy = "policy: kv-centric  "
    text = QUICKSTART.read_text()
    assert policy in text
    manifest.write_text(text.replace(policy, "disaggregationThresholdTokens: 2048\n      " + policy))
    code, _, told = _run("-f", manifest, "--trace", trace, "--limit", "3")
    assert code == 0
    assert "spec.scheduler.routing.disaggregationThresholdTokens is not simulated" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "best"], "unknown policy 'best': write one of kv-centric"),
        (["--admission", "never"], "--admission never: write one of none, early, predictive"),
        (["--profile", "h100"], "--profile h100: write one of llama3-70b-8xa800, llama3-70b-8xh800"),
        (["--speed", "fast"], "--speed fast: write numbers above 0"),
        (["--sweep", "decode=1..2"], "--sweep decode=1..2: write prefill=FIRST..LAST"),
        (["--sweep", "prefill=3..9"], "4 of 4 instances for prefill leaves none for one side"),
    ],
)
def test_a_wrong_option_says_what_to_write(trace: Path, arguments: list[str], said: str) -> None:
    code, printed, complained = _run("-f", QUICKSTART, "--trace", trace, *arguments)
    assert code == 1
    assert not printed
    assert said in complained


def test_a_cluster_without_a_side_cannot_be_simulated(trace: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(
        QUICKSTART.read_text().replace("  prefillPools:\n  - name: prefill\n    replicas: 2\n", "")
    )
    code, _, complained = _run("-f", manifest, "--trace", trace)
    assert code == 1
    assert "quickstart: nothing to simulate: write at least one replica into spec.prefillPools" in complained


def test_a_pipeline_of_two_pods_answers_sooner_than_one_pod_and_cannot_be_swept(tmp_path: Path) -> None:
    trace, manifest = tmp_path / "trace.jsonl", tmp_path / "cluster.yaml"
    # Ten chunks each, far apart: two stages take half the time, and the second one has the last chunk yet.
    requests = [
        Request(
            timestamp_ms=60_000.0 * at,
            input_length=20_480,
            output_length=10,
            hash_ids=tuple(range(100 * at, 100 * at + 40)),
        )
        for at in range(1, 6)
    ]
    write_trace(trace, requests)
    text = QUICKSTART.with_name("multi-pod.yaml").read_text()
    ttft_s = []
    for size in (2, 1):
        manifest.write_text(text.replace("size: 2 ", f"size: {size} "))
        code, printed, complained = _run("-f", manifest, "--trace", trace, "--json")
        assert code == 0, complained
        ttft_s.append(json.loads(printed)["runs"][0]["ttft_mean_s"])
    assert 0.54 < ttft_s[0] / ttft_s[1] < 0.57
    code, printed, complained = _run(
        "-f", QUICKSTART.with_name("multi-pod.yaml"), "--trace", trace, "--sweep", "prefill=1..1"
    )
    assert (code, printed) == (1, "")
    assert "write instance.size 1" in complained


def with_ssd(folder: Path) -> Path:
    """The quickstart's cluster, its store with an SSD."""
    text = QUICKSTART.read_text()
    at = text.index("segmentSize:")
    line_end = text.index("\n", at)
    indent = " " * (at - text.rindex("\n", 0, at) - 1)
    path = folder / "ssd.yaml"
    path.write_text(text[:line_end] + f"\n{indent}ssd: {{size: 100Gi, path: /data/kv}}" + text[line_end:])
    return path


def test_rules_for_the_stores_dram_are_compared_where_it_has_an_ssd(trace: Path, tmp_path: Path) -> None:
    arguments = ("--trace", trace, "--tiers", "lru,predicted", "--json")
    code, printed, _ = _run("-f", with_ssd(tmp_path), *arguments)
    assert code == 0
    assert [run["tiers"] for run in json.loads(printed)["runs"]] == ["lru", "predicted"]
    for wanted in (("--tiers", "lru"), ("--copy-hot-blocks",)):
        code, _, told = _run("-f", QUICKSTART, "--trace", trace, *wanted)
        assert code == 1
        assert f"{wanted[0]}: the manifest has no store with an SSD" in " ".join(told.split())
        assert "kvCachePools[].ssd" in told
    code, printed, _ = _run("-f", with_ssd(tmp_path), "--trace", trace, "--copy-hot-blocks", "--json")
    assert code == 0
    assert [run["copied_blocks"] for run in json.loads(printed)["runs"]] == [0]
    code, _, told = _run("-f", with_ssd(tmp_path), "--trace", trace, "--tiers", "mru")
    assert code == 1
    assert "lru, lfu, length-aware, predicted, steered" in told


def test_instances_that_die_leave_their_mark(trace: Path) -> None:
    code, printed, _ = _run("-f", QUICKSTART, "--trace", trace, "--die", "d-0@5s..15s", "--json")
    assert code == 0
    (run,) = json.loads(printed)["runs"]
    assert run["completed"] + run["refused"] + run["failed"] == run["requests"]
    assert run["failed"] > 0
    code, printed, _ = _run("-f", QUICKSTART, "--trace", trace, "--die", "d-0@5s..15s")
    assert code == 0
    assert "failed" in printed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("d-0", "write e.g. d-0@120s"),
        ("d-0@soon", "not a duration: 'soon'"),
        ("d-0@9s..3s", "the second after the first"),
        ("x-9@5s", "x-9 cannot die: there are p-0"),
    ],
)
def test_deaths_that_cannot_be_are_refused(trace: Path, text: str, told: str) -> None:
    code, _, error = _run("-f", QUICKSTART, "--trace", trace, "--die", text)
    assert code == 1
    assert told in " ".join(error.split())


def test_all_means_all_wherever_it_stands(trace: Path) -> None:
    code, printed, _ = _run(
        "-f", QUICKSTART, "--trace", trace, "--policy", "random,all", "--limit", "3", "--json"
    )
    assert code == 0
    assert len({run["policy"] for run in json.loads(printed)["runs"]}) == 10
