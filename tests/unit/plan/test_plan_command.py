"""`mooncakectl plan` as people and machines use it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mooncake_core.api.cluster import MooncakeCluster
from mooncake_core.api.manifests import load_manifests
from mooncake_simulator.cluster.manifest import spec_of
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import generate, read_trace, write_trace
from mooncakectl.app import build_app
from mooncakectl.plan.manifest import with_sizes
from mooncakectl.plan.search import Size
from mooncakectl.plan.slo import kept, objectives_of

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, generate(120, 1))
    return path


def _run(*arguments: object) -> tuple[int, str, str]:
    ran = CliRunner().invoke(build_app(), ["plan", *map(str, arguments)])
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize("options", [[], ["--prefill-price", "1", "--decode-price", "7"], ["--seeds", "3"]])
def test_the_plan_keeps_the_slo_and_one_instance_fewer_on_either_side_does_not(
    trace: Path, tmp_path: Path, options: list[str]
) -> None:
    planned = tmp_path / "planned.yaml"
    code, _, said = _run(
        "-f", QUICKSTART, "--trace", trace, "--speed", "20", "--max-prefill", "24", "--max-decode", "24",
        "-o", planned, *options,
    )  # fmt: skip
    assert code == 0, said
    (cluster,) = [each for each in load_manifests(planned) if isinstance(each, MooncakeCluster)]
    spec, objectives = spec_of(cluster), objectives_of(cluster.spec.slo)
    seeds = range(3 if "--seeds" in options else 1)
    assert spec.prefill > 1

    def keeps(prefill: int, decode: int) -> bool:
        size = replace(spec, prefill=prefill, decode=decode)
        runs = [simulate(size, read_trace(trace), speed=20, seed=seed) for seed in seeds]
        return all(kept(run, objectives).keeps(objectives) for run in runs)

    assert keeps(spec.prefill, spec.decode)
    assert not keeps(spec.prefill - 1, spec.decode)
    if spec.decode > 1:
        assert not keeps(spec.prefill, spec.decode - 1)


def test_machines_get_what_was_tried_and_what_it_costs(trace: Path) -> None:
    code, printed, said = _run(
        "-f",
        QUICKSTART,
        "--trace",
        trace,
        "--speed",
        "20",
        "--gpu-price",
        "2.5",
        "--json",
        "--max-prefill",
        "20",
    )
    assert code == 0, said
    found = json.loads(printed)
    chosen = next(
        each
        for each in found["tried"]
        if (each["prefill"], each["decode"]) == (found["prefill"], found["decode"])
    )
    assert chosen["keeps_slo"]
    assert found["cost_per_hour"] == chosen["cost_per_hour"] == (found["prefill"] + found["decode"]) * 8 * 2.5
    assert found["cost_per_million_tokens"] > 0
    cheaper = [each for each in found["tried"] if each["cost_per_hour"] < found["cost_per_hour"]]
    assert cheaper
    assert not any(each["keeps_slo"] for each in cheaper)
    (manifest,) = yaml.safe_load_all(found["manifest"])
    assert manifest["spec"]["prefillPools"][0]["replicas"] == found["prefill"]


def test_the_manifest_goes_to_stdout_and_the_table_does_not(trace: Path) -> None:
    code, printed, said = _run("-f", QUICKSTART, "--trace", trace, "--speed", "20", "--max-prefill", "20")
    assert code == 0
    assert printed.startswith("# The smallest whole Mooncake")
    assert isinstance(load_manifests(printed)[0], MooncakeCluster)
    assert "cheapest that keeps the SLO" in said
    assert "GPU-hours for a million tokens" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speed", "20", "--max-prefill", "2"], "prefill and 32 decode instances"),
        (["--speed", "0"], "--speed 0: write a number above 0"),
        (["--gpu-price", "-1"], "--gpu-price -1: write a number above 0"),
        (["--prefill-price", "2"], "write both, or --gpu-price for the other"),
    ],
)
def test_what_cannot_be_planned_says_why_and_what_to_write(
    trace: Path, options: list[str], said: str
) -> None:
    code, printed, complained = _run("-f", QUICKSTART, "--trace", trace, *options)
    assert code == 1
    assert not printed
    assert said in complained.replace("\n", " ")


@pytest.mark.parametrize(
    ("target", "tighter", "said"),
    [
        (
            "30s",
            "1ms",
            "spec.slo.ttft: no number of instances keeps it: 200 of 200 requests need more than 0.001",
        ),
        (
            "100ms",
            "27ms",
            "spec.slo.tbt: no number of instances keeps it: 62 of 200 requests need more than 0.027",
        ),
    ],
)
def test_a_target_that_requests_miss_all_alone_is_no_size_s_fault_and_nothing_is_simulated(
    trace: Path, tmp_path: Path, target: str, tighter: str, said: str
) -> None:
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(QUICKSTART.read_text().replace(f"target: {target}", f"target: {tighter}"))
    code, _, complained = _run("-f", manifest, "--trace", trace, "--max-prefill", "300", "--max-decode", "8")
    assert code == 1
    assert said in complained
    assert "even alone on one (llama3-70b-8xa800), up to" in complained
    assert "kept for" not in complained


def test_where_the_largest_fails_it_is_said_what_else_was_tried(trace: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(QUICKSTART.read_text().replace("target: 100ms", "target: 30ms"))
    code, _, complained = _run(
        "-f", manifest, "--trace", trace, "--speed", "20", "--max-prefill", "24", "--max-decode", "1"
    )
    assert code == 1
    assert "24 prefill and 1 decode instances, the most that may be, do not keep the SLO: TTFT" in complained
    assert "(nor with 12, 6, 3, 1 prefill instances, which hand decode less)" in complained


def test_without_a_promise_there_is_nothing_to_plan_for(trace: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(QUICKSTART.read_text())
    del document["spec"]["slo"]
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(yaml.safe_dump(document))
    code, _, complained = _run("-f", manifest, "--trace", trace)
    assert code == 1
    assert "spec.slo: nothing to plan for: write e.g. ttft:" in complained


def test_sizes_that_the_manifest_s_own_rules_forbid_are_not_chosen(trace: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(QUICKSTART.read_text())
    document["spec"]["coordination"] = {"ratio": {"minPrefillPerDecode": "1", "maxPrefillPerDecode": "1"}}
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(yaml.safe_dump(document))
    code, printed, said = _run(
        "-f", manifest, "--trace", trace, "--speed", "20", "--json", "--max-prefill", "20"
    )
    assert code == 0, said
    found = json.loads(printed)
    assert found["prefill"] == found["decode"]
    _, _, said = _run("-f", manifest, "--trace", trace, "--speed", "20", "--max-prefill", "20")
    verdicts = dict(line.split(maxsplit=1) for line in said.splitlines() if "+" in line.split(" ")[0])
    keeping = {size: said for size, said in verdicts.items() if "keeps" in said}
    assert len(keeping) > 1
    for size, verdict in keeping.items():
        prefill, decode = size.split("+")
        assert ("not allowed" in verdict) == (prefill != decode), verdict


SHARED = {
    "of both pools": "prefillPools: [{name: p, replicas: &n 2}]\n  decodePools: [{name: d, replicas: *n}]",
    "with something else": "prefillPools: [{name: p, replicas: 2}]\n  decodePools: [{name: d, replicas: *n}]",
    "of the whole list": "prefillPools: &all [{name: p, replicas: 2}]\n  decodePools: *all",
}


@pytest.mark.parametrize("name", SHARED)
def test_a_number_that_pools_share_through_an_anchor_is_told_with_its_line(name: str) -> None:
    text = f"metadata: {{labels: {{n: &n 3}}}}\nspec:\n  {SHARED[name]}\nkind: MooncakeCluster\n"
    if name == "of both pools":
        text = text.replace("&n 3", "3")
    where = "line 1" if name == "with something else" else "line 3"
    with pytest.raises(ValueError, match=f"{where}: replicas of spec.* shared through a YAML anchor"):
        with_sizes(text, Size(2, 1))


MANIFESTS = {
    "block": """
spec:
  prefillPools:
  - name: p   # the first
    replicas: 12   # many
  decodePools:
  - {name: d, replicas: 1}
kind: MooncakeCluster
""",
    "left out": """
kind: MooncakeCluster
spec:
  decodePools: [{name: d}]
  prefillPools:
  - name: p
    drain: {timeoutSeconds: 60}
""",
    "behind another document": """
kind: ConfigMap
data: {prefillPools: "no"}
---
kind: MooncakeCluster
spec: {prefillPools: [{name: p, replicas: 2}], decodePools: [{name: d, replicas: 2}]}
""",
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_only_the_two_numbers_of_a_manifest_change(name: str) -> None:
    text = MANIFESTS[name]
    written = with_sizes(text, Size(7, 30))
    before, after = list(yaml.safe_load_all(text)), list(yaml.safe_load_all(written))
    for document in before:
        if document["kind"] == "MooncakeCluster":
            document["spec"]["prefillPools"][0]["replicas"] = 7
            document["spec"]["decodePools"][0]["replicas"] = 30
    assert after == before
    assert written.count("#") == text.count("#")
    assert with_sizes(written, Size(7, 30)) == written
