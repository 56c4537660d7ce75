"""Whatever is typed, piped or pointed at: an error in one line that names the place, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mooncakectl.app
from mooncake_simulator.workloads import Request, write_trace
from mooncakectl.__main__ import main
from mooncakectl.addresses import bearer, checked_url
from mooncakectl.app import build_app
from mooncakectl.console import CommandError, in_seconds
from mooncakectl.local.errors import LocalRuntimeError
from mooncakectl.local.ports import first_free_port

CLUSTER = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: q}
spec:
  model: {name: m}
  engine: {type: Simulated, simulated: {profile: llama3-70b-8xa800, timeScale: 10}}
  slo: {ttft: {percentile: 90, target: 30s}, tbt: {percentile: 90, target: 100ms}}
  prefillPools: [{name: p, replicas: 2}]
  decodePools: [{name: d, replicas: 2}]
"""
OWN_POOL = """---
apiVersion: mooncake.io/v1alpha1
kind: Mooncake%sPool
metadata: {name: fast}
spec: {clusterRef: {name: %s}, replicas: 3%s}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return _trace(tmp_path / "trace.jsonl", 0, 1_000, 2_000)


def _trace(path: Path, *at_ms: float) -> Path:
    write_trace(
        path, [Request(timestamp_ms=at, input_length=600, output_length=5, hash_ids=(1, 2)) for at in at_ms]
    )
    return path


def _run(*arguments: object) -> tuple[int, str, str]:
    ran = CliRunner().invoke(build_app(), [*map(str, arguments)])
    error = f"error: {ran.exception}" if isinstance(ran.exception, CommandError) else ""
    return ran.exit_code, ran.stdout, ran.stderr + error


def _typed(*arguments: object, shell: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """The program itself, as a shell starts it."""
    command = [sys.executable, "-m", "mooncakectl", *map(str, arguments)]
    if shell:
        command = ["bash", "-c", f'"$@" {shell}', "bash", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_names_that_look_like_markup_are_shown_as_they_are(manifest: Path, tmp_path: Path) -> None:
    for name in ("[bold].jsonl", "[-x].jsonl", "[", ":warning:.jsonl"):
        trace = _trace(tmp_path / name, 0, 1_000)
        assert name in _run("simulate", "-f", manifest, "--trace", trace)[1]
        # A path that is long enough is broken into lines.
        assert name in _run("workload", "stats", trace)[1].replace("\n", "")
    closing = tmp_path / "["
    closing.unlink()
    closing.mkdir()
    assert "[/red]" in _run("workload", "generate", "--sessions", "2", "--out", closing / "red]")[1]


@pytest.mark.parametrize(("columns", "names_stay_whole"), [("", True), ("80", True), ("72", False)])
def test_no_figure_is_cut_however_narrow_the_terminal(
    manifest: Path, tmp_path: Path, columns: str, names_stay_whole: bool
) -> None:
    trace = _trace(tmp_path / ("long-" * 12 + ".jsonl"), 0)
    env = {**os.environ, "COLUMNS": columns}
    ran = _typed("simulate", "-f", manifest, "--trace", trace, "--policy", "all", env=env)
    assert ran.returncode == 0, ran.stderr
    assert "…" not in ran.stdout
    assert ("sglang-cache-aware" in ran.stdout) is names_stay_whole


@pytest.mark.parametrize("arguments", [["simulate"], ["simulate", "--json"]])
def test_a_full_disk_is_told_in_a_line(manifest: Path, trace: Path, arguments: list[str]) -> None:
    ran = _typed(*arguments, "-f", manifest, "--trace", trace, shell="> /dev/full")
    assert ran.returncode == 1
    assert ran.stderr.strip() == "error: No space left on device"
    written = _typed(*arguments, "-f", manifest, "--trace", trace, "--report", "/dev/full")
    assert written.returncode == 1
    assert written.stderr.strip().endswith("error: /dev/full: No space left on device")
    # What took the time is not lost with the file.
    assert "trace.jsonl" in written.stdout


def test_a_closed_stdout_is_no_traceback(manifest: Path, trace: Path) -> None:
    for flags in ([], ["--json"]):
        ran = _typed("simulate", "-f", manifest, "--trace", trace, *flags, shell=">&-")
        assert (ran.returncode, ran.stderr.strip()) == (0, "")


@pytest.mark.parametrize(
    ("command", "option"),
    [("simulate", "--report"), ("plan", "--output"), ("replay", "--json"), ("replay", "--records")],
)
def test_where_nothing_can_be_written_is_said_before_anything_is_done(
    manifest: Path, trace: Path, tmp_path: Path, command: str, option: str
) -> None:
    given = ["--trace", trace] if command == "replay" else ["-f", manifest, "--trace", trace]
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for place, said in (
        (tmp_path, "that is a folder"),
        (tmp_path / "no" / "x", "make it first"),
        (circle, "that link leads back to itself"),
    ):
        code, printed, told = _run(command, *given, option, place)
        assert (code, printed) == (1, "")
        assert f"error: {option} {place}: {said}" in told or f"error: {option} {place}: there is no" in told


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("simulate", "--report"),
        ("plan", "--output"),
        ("replay", "--json"),
        ("replay", "--records"),
        ("workload", "--json"),
    ],
)
def test_no_command_writes_over_the_trace_that_it_reads(
    manifest: Path, trace: Path, tmp_path: Path, command: str, option: str
) -> None:
    before = trace.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(trace)
    given = {"replay": ["--trace", trace], "workload": ["stats", trace]}
    code, _, told = _run(command, *given.get(command, ["-f", manifest, "--trace", trace]), option, link)
    assert code == 1
    assert f"error: {option} {link}: this command has another use for that file: name another one" in told
    assert trace.read_bytes() == before


def test_a_replay_writes_its_summary_and_its_records_to_two_files(trace: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    code, _, told = _run("replay", "--trace", trace, "--json", both, "--records", both)
    assert code == 1
    assert f"error: --records {both}: this command has another use for that file" in told
    assert not both.exists()


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_manifest_may_come_from_a_pipe(trace: Path, command: str) -> None:
    ran = _typed(command, "-f", "/dev/stdin", "--trace", trace, input=CLUSTER)
    assert ran.returncode == 0, ran.stderr


def test_a_plan_rewrites_a_file_and_not_a_folder(manifest: Path, trace: Path) -> None:
    code, _, told = _run("plan", "-f", manifest.parent, "--trace", trace)
    assert code == 1
    assert f"error: {manifest.parent}: Is a directory" in told


def test_pools_written_on_their_own_are_simulated_as_up_runs_them(manifest: Path, trace: Path) -> None:
    manifest.write_text(CLUSTER + OWN_POOL % ("Prefill", "q", ""))
    code, printed, told = _run("simulate", "-f", manifest, "--trace", trace, "--json")
    assert code == 0, told
    (run,) = json.loads(printed)["runs"]
    assert (run["prefill"], run["decode"]) == (5, 2)
    code, _, told = _run("plan", "-f", manifest, "--trace", trace)
    assert code == 1
    assert "MooncakePrefillPool fast: a plan sizes pools that are written into their cluster" in told
    manifest.write_text(CLUSTER + OWN_POOL % ("KVCache", "q", ", segmentSize: 1Ti"))
    code, printed, told = _run("simulate", "-f", manifest, "--trace", trace, "--json")
    assert code == 0, told
    assert "store" in json.loads(printed)["runs"][0]["prompt_tokens"]
    manifest.write_text(CLUSTER + OWN_POOL % ("Prefill", "other", ""))
    code, _, told = _run("simulate", "-f", manifest, "--trace", trace)
    assert code == 1
    assert "clusterRef is other, the cluster is q" in told


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_one_wrong_time_stamp_does_not_take_all_memory(manifest: Path, tmp_path: Path, command: str) -> None:
    for at_ms, options in (((1.7e12, 0), []), ((0, 1e18), []), ((0, 60_000), ["--speed", "1e-9"])):
        trace = _trace(tmp_path / "t.jsonl", *at_ms)
        code, _, told = _run(command, "-f", manifest, "--trace", trace, *options)
        assert code == 1
        assert "t.jsonl: arrivals over" in told
        assert "a year is the most" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "--sweep", "prefill=1..99999999999"], "--sweep prefill=1..99999999999: write"),
        (["simulate", "--sweep", "prefill=1..999999"], "sweep from 1 to 3 at most"),
        (["simulate", "--load-age-s", "inf"], "--load-age-s inf: write a number of seconds"),
        (["plan", "--gpu-price", "1e308"], "--gpu-price 1e+308: write a number above 0, up to"),
        (["replay", "--speed", "inf"], "--speed inf: write a number above 0"),
        (["replay", "--jitter-ms", "inf"], "--jitter-ms inf: write a number of milliseconds"),
        (["replay", "--slo-tbt", "1e400"], "--slo-tbt 1e400: that is for ever"),
    ],
)
def test_numbers_without_sense_are_refused_by_name(
    manifest: Path, trace: Path, arguments: list[str], said: str
) -> None:
    given = [] if arguments[0] == "replay" else ["-f", manifest]
    code, _, told = _run(*arguments, *given, "--trace", trace)
    assert code == 1
    assert f"error: {said}" in told or said in told


@pytest.mark.parametrize("speed", ["nan", "inf"])
def test_a_demo_without_a_speed_starts_nothing(manifest: Path, speed: str) -> None:
    code, printed, told = _run("demo", "-f", manifest, "--speed", speed)
    assert code in (1, 2)
    assert printed == ""
    assert "--speed" in told


def test_a_plan_for_one_request_has_no_price_for_a_million_tokens(manifest: Path, tmp_path: Path) -> None:
    alone = _trace(tmp_path / "one.jsonl", 5_000)
    code, printed, told = _run("plan", "-f", manifest, "--trace", alone, "--json")
    assert code == 0, told
    found = json.loads(printed)
    assert (found["prefill"], found["decode"]) == (1, 1)
    assert found["cost_per_million_tokens"] is None
    assert "million" not in _run("plan", "-f", manifest, "--trace", alone)[2]


def test_the_report_says_how_it_was_made_however_options_were_written(
    manifest: Path, trace: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    ran = _typed("simulate", f"--file={manifest}", f"--trace={trace}", "--report", report)
    assert ran.returncode == 0, ran.stderr
    made = "mooncakectl simulate --file=cluster.yaml --trace=trace.jsonl --report report.html"
    assert made in report.read_text()


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://x", "", "http://?x", "http://h:abc", "http://h:99999", "http://h:0", "http://[::1",
     "http://a..b", "http://a b", "http://a\nb"],
)  # fmt: skip
@pytest.mark.parametrize("command", [["status"], ["explain", "x"], ["drain", "x"], ["replay"]])
def test_a_url_that_cannot_be_is_told_before_anybody_is_asked(
    command: list[str], url: str, trace: Path
) -> None:
    given = ["--trace", trace] if command == ["replay"] else []
    code, _, told = _run(*command, *given, "--url", url)
    assert code == 1
    assert f"error: --url {url}: expected something like http://127.0.0.1:8000" in told


def test_urls_that_can_be_are_taken() -> None:
    for url in ("http://127.0.0.1:8000", "https://[::1]:1/v1", "http://höst", "HTTP://host:65535"):
        assert checked_url(url).hostname


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown() -> None:
    assert bearer("sk-1", "--api-key") == {"Authorization": "Bearer sk-1"}
    for key in ("é", "a\nb", "\x00"):
        with pytest.raises(CommandError, match=r"--api-key: a key is one line of ASCII") as refused:
            bearer(key, "--api-key")
        assert key not in str(refused.value)


def test_a_token_file_that_is_no_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(b"\xb6")
    monkeypatch.setenv("MOONCAKE_ADMIN_TOKEN", f"@{tmp_path / 'token'}")
    code, _, told = _run("status", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "not a text file" in told


def test_times_are_rounded_before_their_unit_is_chosen() -> None:
    shown = [in_seconds(value_s) for value_s in (0, 0.00012345, 0.9994, 0.9996, 1, 99.94, 99.96, 100, 12_345)]
    assert shown == ["0 ms", "0.123 ms", "999 ms", "1 s", "1 s", "99.9 s", "100 s", "100 s", "12,345 s"]


def test_one_port_that_is_taken_is_not_called_several() -> None:
    with pytest.raises(LocalRuntimeError, match=r"^port 8000 is taken"):
        first_free_port(8000, tries=1, is_free=lambda port: False)
    with pytest.raises(LocalRuntimeError, match=r"^ports 65500 to 65535 are all taken"):
        first_free_port(65_500, is_free=lambda port: False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--turns", "1e400"], "1e400: a value of inf"),
        (["--gap", "1e400", "--turns", "3"], "1e400: a value of inf"),
        (["--output-tokens", "1e30"], "1e30: a value of 1e+30"),
        (["--gap", "lognormal:60s:900", "--turns", "9"], "no trace holds more than"),
        (["--rate", "nan"], "nan sessions a second"),
        (["--rate", "1e-320"], "sessions a second"),
        (["--rate", "inf"], "inf sessions a second"),
    ],
)
def test_a_workload_that_no_trace_holds_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    out = tmp_path / "t.jsonl"
    code, _, told = _run("workload", "generate", "--sessions", "20", "--out", out, *options)
    assert code == 1
    assert said in told
    assert not out.exists()


def test_no_prompt_is_longer_than_the_longest_that_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    for most in (1, 513, 2_000):
        options = ["--max-input-tokens", most, "--system-tokens", "1k", "--sessions", "20", "--out", out]
        code, _, told = _run("workload", "generate", *options)
        assert code == 0, told
        lengths = [json.loads(line)["input_length"] for line in out.read_text().splitlines()]
        assert max(lengths) <= most


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "config is no kubeconfig"),
        (b"[1]", "config is no kubeconfig"),
        (b"\xb6\xff", "config is no kubeconfig"),
        (b"a: [", "config: while parsing"),
        (b"{}", "config: Invalid kube-config file. Expected key current-context"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    code, printed, told = _run("rollout", "history", "kimi", "--kubeconfig", file)
    assert (code, printed) == (1, "")
    assert f"error: no Kubernetes cluster: {tmp_path}/{said}" in told
    assert "write --kubeconfig FILE" in told


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    assert f"there is no {tmp_path}/a:{tmp_path}/b" in _run("rollout", "status", "kimi")[2]
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "there is no ~/.kube/config" in _run("rollout", "status", "kimi")[2]


def test_ctrl_c_is_no_traceback_while_the_program_is_still_being_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mooncakectl.app, "build_app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
