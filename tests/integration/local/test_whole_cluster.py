"""The command line with a whole cluster of real processes behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_testing.ports import free_port
from mooncakectl.local.procfs import read_stat

MANIFEST = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: whole}
spec:
  model: {name: tiny}
  engine:
    type: Simulated
    connector: MooncakeConnector
    blockSize: 512
    simulated: {profile: llama3-70b-8xa800, timeScale: 20}
  slo:
    ttft: {percentile: 90, target: 30s}
    tbt: {percentile: 90, target: 100ms}
  prefillPools: [{name: prefill, replicas: 1}]
  decodePools: [{name: decode, replicas: 1, drain: {timeoutSeconds: 20}}]
  kvCachePools: [{name: kv, replicas: 1, segmentSize: 1Ti}]
  scheduler:
    routing: {policy: algorithm-1}
    admission: {mode: none}
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    path.write_text(MANIFEST)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mooncakectl", *arguments]


def ask(*arguments: str) -> Any:
    answer = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@contextmanager
def starting(manifest: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[], dict[str, Any]]]]:
    """`mooncakectl up`, and what waits until it is ready; whatever the test does, nothing of it is left."""
    arguments = command("up", "-f", str(manifest), "--json", "--port", str(free_port()))
    errors = manifest.with_suffix(".err").open("w+")
    with errors, subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True) as program:
        assert program.stdout is not None
        told = program.stdout

        def ready() -> dict[str, Any]:
            document = ""
            while not document.endswith("}\n"):
                line = told.readline()
                assert line, errors.seek(0) or errors.read()
                document += line
            addresses: dict[str, Any] = json.loads(document)
            return addresses

        try:
            yield program, ready
        finally:
            program.kill()


@contextmanager
def up(manifest: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`mooncakectl up`, ready."""
    with starting(manifest) as (program, ready):
        yield program, ready()


def recorded_processes(state: Path) -> list[int]:
    record = json.loads((state / "mooncake" / "whole" / "state.json").read_text())
    return [process["identity"]["pid"] for process in record["processes"]]


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses, as `/proc/net/tcp` has them, and ports at which these processes wait for TCP connections."""
    owned: set[str] = set()
    for pid in pids:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                owned.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def all_gone(pids: list[int], timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if (stat := read_stat(pid)) is not None and not stat.is_zombie]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_up_serves_is_watched_explains_itself_and_drains_on_ctrl_c(manifest: Path, tmp_path: Path) -> None:
    with up(manifest) as (program, addresses):
        body = {"model": "tiny", "prompt": list(range(1, 1500)), "max_tokens": 8}
        answer = httpx.post(f"{addresses['endpoint']}/v1/completions", json=body, timeout=30, trust_env=False)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 8

        listening = listeners(recorded_processes(tmp_path / "state"))
        assert len(listening) >= 10
        assert {address for address, _ in listening} == {"0100007F"}, "127.0.0.1, and nothing else"

        told = ask("status", "--json")
        roles = {item["role"] for item in told["instances"]}
        assert roles >= {"prefill", "decode"}
        assert "tiny" in addresses["model"]

        decision = ask("explain", answer.headers["x-request-id"], "--json")
        assert decision["request_id"] == answer.headers["x-request-id"]
        shown = subprocess.run(
            command("explain", answer.headers["x-request-id"]), capture_output=True, text=True, check=True
        )
        assert "whole-decode-d-0" in shown.stdout

        second = subprocess.run(
            command("up", "-f", str(manifest)), capture_output=True, text=True, check=False
        )
        assert second.returncode == 1
        assert f"cluster whole is already up at {addresses['endpoint']}" in second.stderr

        processes = recorded_processes(tmp_path / "state")
        assert len(processes) >= 5
        assert stream_over_interrupts(program, addresses["endpoint"], 1)
        assert program.wait(60) == 0
        assert all_gone(processes)
        assert not (tmp_path / "state" / "mooncake" / "whole" / "state.json").exists()


def stream_over_interrupts(program: subprocess.Popen[str], endpoint: str, interrupts: int) -> bool:
    """Whether a stream comes to its own end although Ctrl-C was pressed so many times meanwhile."""
    body = {"model": "tiny", "prompt": [1] * 600, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"{endpoint}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        for _ in range(interrupts):
            program.send_signal(signal.SIGINT)
            time.sleep(0.5)
        return any('"finish_reason":"length"' in line for line in rest_of(lines))


def rest_of(lines: Iterator[str]) -> list[str]:
    """What still arrives of a stream, also when it is cut."""
    rest = []
    with suppress(httpx.HTTPError):
        for line in lines:
            rest.append(line)
    return rest


def test_after_kill_9_a_second_up_serves_and_ctrl_c_twice_ends_it_at_once(
    manifest: Path, tmp_path: Path
) -> None:
    with up(manifest) as (program, _):
        first = recorded_processes(tmp_path / "state")
        os.kill(program.pid, signal.SIGKILL)
        program.wait(10)
        assert all_gone(first)
        with up(manifest) as (again, addresses):
            answer = httpx.get(f"{addresses['endpoint']}/v1/models", timeout=30, trust_env=False)
            assert answer.json()["data"][0]["id"] == "tiny"
            second = recorded_processes(tmp_path / "state")
            assert not stream_over_interrupts(again, addresses["endpoint"], 2)
            assert again.wait(60) == 0
            assert all_gone(second)


def test_two_clusters_of_one_name_that_start_at_once_are_both_served_on_ports_of_their_own(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = manifest.with_stem("another")
    another.write_text(MANIFEST)
    with ExitStack() as both:
        first, its_addresses = both.enter_context(starting(manifest))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-of-another"))
        second, others_addresses = both.enter_context(starting(another))
        for addresses in (its_addresses(), others_addresses()):
            body = {"model": "tiny", "prompt": [1] * 600, "max_tokens": 2}
            url = f"{addresses['endpoint']}/v1/completions"
            assert httpx.post(url, json=body, timeout=30, trust_env=False).status_code == 200
        processes = [recorded_processes(tmp_path / state) for state in ("state", "state-of-another")]
        assert not listeners(processes[0]) & listeners(processes[1])
        for program in (first, second):
            program.send_signal(signal.SIGINT)
        assert (first.wait(60), second.wait(60)) == (0, 0)
        assert all_gone([*processes[0], *processes[1]])


def test_when_nobody_reads_any_more_it_ends_and_nothing_is_left(manifest: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = command("up", "-f", str(manifest), "--no-table", "--port", str(free_port()))
    # Events on stderr go unread before the first line on stdout does: only that one matters.
    with subprocess.Popen(arguments, stdout=writer, stderr=writer) as program:
        os.close(writer)
        assert program.wait(120) == 1
    folder = tmp_path / "state" / "mooncake" / "whole"
    assert "serving tiny" in (folder / "logs" / "whole-decode-d-0" / "engine.log").read_text()
    assert not (folder / "state.json").exists()


def test_the_demo_loses_nothing_and_reuses_what_was_computed_behind_api_keys(
    manifest: Path, tmp_path: Path
) -> None:
    manifest.write_text(MANIFEST + "    auth: {apiKeySecretRef: {name: clients}}\n")
    (tmp_path / "secrets" / "clients").mkdir(parents=True)
    (tmp_path / "secrets" / "clients" / "keys.json").write_text('{"alice": "sk-alice"}')
    figures = tmp_path / "figures.json"
    arguments = ["demo", "-f", str(manifest), "--requests", "20", "--port", str(free_port())]
    arguments += ["--secrets", str(tmp_path / "secrets"), "--api-key", "sk-alice"]
    result = subprocess.run(
        command(*arguments, "--speed", "60", "--json", str(figures)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(figures.read_text())
    assert (told["completed"], told["lost"], told["failed"]) == (20, 0, 0)
    assert told["token_hit_rate"] > 0.4
    assert "token hit rate" in result.stdout
