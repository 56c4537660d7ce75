"""The command as a user runs it: its exit codes, its table, its file, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from mooncake_simulator.workloads import Request, write_trace
from mooncake_testing.certificates import self_signed
from mooncake_testing.openai_server import Answer, OpenAIServer, Received

COMMAND = """
import typer
from mooncakectl.replay.command import register
app = typer.Typer()
register(app)
app.callback()(lambda: None)
app()
"""


async def start(*arguments: str, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMMAND,
        "replay",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"COLUMNS": "160", "PATH": "/usr/bin:/bin", **env},
    )


def write(path: Path, count: int, every_ms: int = 0) -> str:
    requests = [
        Request(timestamp_ms=n * every_ms, input_length=10, output_length=3, hash_ids=(n,))
        for n in range(count)
    ]
    write_trace(path, requests)
    return str(path)


async def test_a_replay_prints_a_table_and_writes_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    async with OpenAIServer(lambda received: Answer(cached_tokens=5), time_scale=10) as server:
        process = await start(
            *("--trace", write(tmp_path / "t.jsonl", 5), "--url", server.url, "--json", str(file)),
            *("--skip", "1", "--limit", "3", "--records", str(tmp_path / "records.jsonl")),
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary: dict[str, Any] = json.loads(file.read_bytes())
    assert summary["completed"] == 3
    assert summary["token_hit_rate"] == 0.5
    assert {"refused", "lost", "failed", "goodput", "ttft", "tbt"} <= summary.keys()
    assert {"p50_s", "p90_s", "p99_s"} <= summary["ttft"].keys()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    assert [(record["index"], record["kind"]) for record in records] == [(n, "completed") for n in range(3)]
    assert "10 model seconds per wall second" in " ".join(out.decode().split())


async def test_ctrl_c_ends_a_replay_with_the_summary_of_what_ran(tmp_path: Path) -> None:
    def script(received: Received) -> Answer:
        return Answer() if received.index < 2 else Answer(hang=True)

    file = tmp_path / "summary.json"
    async with OpenAIServer(script) as server:
        process = await start(
            *("--trace", write(tmp_path / "t.jsonl", 50, every_ms=50), "--url", server.url),
            *("--json", str(file)),
        )
        await server.until_received(4)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 130
    assert "interrupted" in out.decode()
    summary = json.loads(file.read_bytes())
    assert summary["completed"] == 2
    assert summary["lost"] == 0


async def test_what_cannot_be_replayed_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0}\n')
    for arguments, told in (
        (("--trace", str(tmp_path / "none.jsonl")), "No such file"),
        (("--trace", str(tmp_path / "bad.jsonl")), "bad.jsonl:1:"),
        (("--trace", write(tmp_path / "t.jsonl", 1), "--url", "http://127.0.0.1:1"), "is a server running"),
        (("--trace", write(tmp_path / "t.jsonl", 1), "--slo-ttft", "soon"), "--slo-ttft soon"),
    ):
        process = await start(*arguments)
        _, err = await process.communicate()
        assert process.returncode == 1
        assert told in err.decode()
        assert "Traceback" not in err.decode()


async def test_the_environments_proxy_is_not_asked_the_way_to_the_server(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:1"
    async with OpenAIServer(lambda received: Answer()) as server:
        process = await start(
            *("--trace", write(tmp_path / "t.jsonl", 2), "--url", server.url),
            http_proxy=nobody,
            ALL_PROXY=nobody,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "100.0%" in out.decode()


async def test_the_certificates_of_the_environment_are_trusted_and_no_others(tmp_path: Path) -> None:
    certificate, tls = self_signed(tmp_path)
    async with OpenAIServer(lambda received: Answer(), tls=tls) as server:
        arguments = ("--trace", write(tmp_path / "t.jsonl", 2), "--url", server.url)
        process = await start(*arguments, SSL_CERT_FILE=str(certificate))
        out, err = await process.communicate()
        stranger = await start(*arguments)
        _, refused = await stranger.communicate()
    assert process.returncode == 0, err.decode()
    assert "100.0%" in out.decode()
    assert stranger.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in refused.decode()
