"""Two real vLLM engines, the simulated pair that stands for them, and the gateway in front."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_testing.engine_exchange import EnginePair
from mooncake_testing.ports import free_port
from mooncake_testing.vllm_engine import BLOCK_SIZE_TOKENS, VllmEngine, VllmPair, ensure_tiny_model
from mooncake_testing.vllm_environment import ensure_environment


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPair]:
    """One prefill and one decode vLLM on CPU over the Mooncake connector."""
    environment = ensure_environment()
    folder = tmp_path_factory.mktemp("vllm")
    model = ensure_tiny_model(environment, folder / "tiny")
    prefill = VllmEngine(
        environment, model, free_port(), folder / "prefill.log", kv_role="kv_producer",
        bootstrap_port=free_port(), events_port=free_port(), replay_port=free_port(),
    )  # fmt: skip
    decode = VllmEngine(
        environment, model, free_port(), folder / "decode.log", kv_role="kv_consumer",
        events_port=free_port(), replay_port=free_port(),
    )  # fmt: skip
    pair = VllmPair(prefill, decode)
    try:
        for engine in (prefill, decode):
            engine.start()
        for engine in (prefill, decode):
            engine.wait_ready()
        yield pair
    finally:
        for engine in (prefill, decode):
            engine.stop()


@pytest.fixture
def simulated_pair(vllm_pair: VllmPair, tmp_path: Path) -> Iterator[EnginePair]:
    """The same two engines, simulated: the very command lines, another module."""
    ports = {
        name: free_port() for name in ("p", "d", "bootstrap", "events", "replay", "d_events", "d_replay")
    }
    sides = [
        (vllm_pair.prefill, ports["p"], ports["bootstrap"], ports["events"], ports["replay"]),
        (vllm_pair.decode, ports["d"], 0, ports["d_events"], ports["d_replay"]),
    ]
    with contextlib.ExitStack() as stack:
        for real, port, bootstrap, events, replay in sides:
            twin = VllmEngine(
                real.environment, real.model, port, tmp_path / f"{port}.log", kv_role=real.kv_role,
                bootstrap_port=bootstrap, events_port=events, replay_port=replay,
            )  # fmt: skip
            variables = os.environ | {"VLLM_HOST_IP": "127.0.0.1", "PYTHONHASHSEED": "0"}
            if bootstrap:
                variables["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(bootstrap)
            arguments = twin.command()[3:]
            process = subprocess.Popen(
                [sys.executable, "-m", "mooncake_simulator.engine", *arguments, "--profile",
                 "llama3-70b-8xa800", "--time-scale", "10"],
                env=variables,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wait_for(f"http://127.0.0.1:{port}/health", process)
        yield EnginePair(
            prefill_url=f"http://127.0.0.1:{ports['p']}",
            decode_url=f"http://127.0.0.1:{ports['d']}",
            bootstrap_url=f"http://127.0.0.1:{ports['bootstrap']}",
            events_endpoint=f"tcp://127.0.0.1:{ports['events']}",
            replay_endpoint=f"tcp://127.0.0.1:{ports['replay']}",
        )


@pytest.fixture(scope="session")
def gateway_url(vllm_pair: VllmPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler process in front of the real pair."""
    folder = tmp_path_factory.mktemp("gateway")
    pair = vllm_pair
    shared = {
        "cluster": "engines", "model": "tiny", "revision": "1", "engine": EngineKind.VLLM,
        "engine_version": "0.32.0", "connector": "MooncakeConnector", "block_size_tokens": BLOCK_SIZE_TOKENS,
        "kv_capacity_tokens": pair.decode.blocks * BLOCK_SIZE_TOKENS,
    }  # fmt: skip
    instances = [
        Instance(
            id="p-0", role=Role.PREFILL, url=pair.prefill.url, pool="p",
            bootstrap_url=f"http://127.0.0.1:{pair.prefill.bootstrap_port}", **shared,
        ),
        Instance(id="d-0", role=Role.DECODE, url=pair.decode.url, pool="d", **shared),
    ]  # fmt: skip
    (folder / "instances.json").write_bytes(msgspec.json.encode(instances))
    serving, admin = free_port(), free_port()
    config = {
        "cluster": "engines", "model": "tiny", "model_path": str(pair.prefill.model),
        "serving": {"host": "127.0.0.1", "port": serving}, "admin": {"host": "127.0.0.1", "port": admin},
        "instances_file": str(folder / "instances.json"),
    }  # fmt: skip
    (folder / "scheduler.json").write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_scheduler", "--config", str(folder / "scheduler.json")]
    )
    try:
        wait_for(f"http://127.0.0.1:{serving}/ready", process)
        yield f"http://127.0.0.1:{serving}"
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Until the URL answers 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise AssertionError(f"{url} does not answer 200 after {seconds} s")
