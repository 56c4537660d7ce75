"""Servers whose log cannot be written: the disk below it is full, as `/dev/full` always is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from mooncake_testing.ports import free_ports
from mooncake_testing.waiting import eventually

Environment = dict[str, str]


def scheduler(port: int, folder: Path) -> tuple[list[str], Environment, str]:
    config = folder / "scheduler.json"
    instances = folder / "instances.json"
    instances.write_text("[]")
    settings = {
        "cluster": "test", "model": "tiny", "instances_file": str(instances), "log_level": "debug",
        "serving": {"host": "127.0.0.1", "port": port}, "admin": {"host": "127.0.0.1", "port": port + 1},
        "routing": {"policy": "kv-centric"}, "admission": {"mode": "none"},
    }  # fmt: skip
    config.write_text(json.dumps(settings))
    return ["mooncake_scheduler", "--config", str(config)], {}, f"{port + 1}/healthz"


def sidecar(port: int, folder: Path) -> tuple[list[str], Environment, str]:
    nowhere = f"http://127.0.0.1:{port + 1}"
    settings = {
        "instance": "engine-0", "cluster": "test", "pool": "prefill", "role": "prefill", "model": "tiny",
        "engine": "Simulated", "engine_url": nowhere, "advertised_url": nowhere,
        "listen": {"host": "127.0.0.1", "port": port}, "redis_url": f"redis://127.0.0.1:{port + 2}/0",
        "journal_dir": str(folder / "journal"), "drain_timeout_s": 0.1, "log_level": "debug",
    }  # fmt: skip
    return ["mooncake_sidecar.engine"], {"MOONCAKE_SIDECAR_CONFIG": json.dumps(settings)}, f"{port}/status"


def engine(port: int, folder: Path) -> tuple[list[str], Environment, str]:
    flags = ["--model", "tiny", "--host", "127.0.0.1", "--port", str(port), "--a-flag-without-a-meaning"]
    return ["mooncake_simulator.engine", *flags], {}, f"{port}/health"


def master(port: int, folder: Path) -> tuple[list[str], Environment, str]:
    flags = ["--host", "127.0.0.1", "--rpc-port", str(port), "--metrics-port", str(port + 1)]
    return ["mooncake_simulator.store", "master", *flags], {}, f"{port + 1}/health"


@pytest.mark.parametrize("server", [scheduler, sidecar, engine, master])
def test_a_server_serves_and_ends_as_it_should_though_no_line_of_its_log_can_be_written(
    server: Callable[[int, Path], tuple[list[str], Environment, str]], tmp_path: Path
) -> None:
    words, environ, health = server(free_ports(3), tmp_path)
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            [sys.executable, "-m", *words], env={**os.environ, **environ}, stdout=full, stderr=full
        ) as process,
    ):
        try:

            def serves() -> bool:
                assert process.poll() is None, "it has ended"
                try:
                    return httpx.get(f"http://127.0.0.1:{health}", timeout=5, trust_env=False).is_success
                except httpx.TransportError:
                    return False

            eventually(serves, "it serves", 30)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
