"""Simulated engines and stores as real processes, for integration tests of any room."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mooncake_testing.ports import free_ports

PORTS_A_POD = 10
_START_TIMEOUT_S = 90.0


def group_flags(leader_base: int, rank: int, nodes: int = 2) -> list[str]:
    """What makes processes one engine of pipeline stages; the leader's port +6 is where they meet."""
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(leader_base + 6)]
    return ["--nnodes", str(nodes), "--node-rank", str(rank), *meet, "--pipeline-parallel-size", str(nodes)]


@dataclass
class SimulatedProcess:
    """A process with a block of ports.

    +0 HTTP, +1 bootstrap or admin, +2 side channel, +4 events, +5 replay.
    """

    base: int
    process: subprocess.Popen[bytes]
    log: Path
    http: httpx.Client

    @property
    def url(self) -> str:
        """Base URL of the engine's HTTP server."""
        return f"http://127.0.0.1:{self.base}"

    @property
    def bootstrap_url(self) -> str:
        """Base URL of an engine's bootstrap server, or of a master's admin server."""
        return f"http://127.0.0.1:{self.base + 1}"

    @property
    def events_endpoint(self) -> str:
        """Where KV events are published."""
        return f"tcp://127.0.0.1:{self.base + 4}"

    @property
    def replay_endpoint(self) -> str:
        """Where they are replayed."""
        return f"tcp://127.0.0.1:{self.base + 5}"

    def get(self, path: str) -> Any:
        """GET a JSON document."""
        return self.http.get(f"{self.url}{path}").json()

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> httpx.Response:
        """POST a JSON document."""
        return self.http.post(f"{self.url}{path}", json=body, timeout=timeout_s)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.http.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def until(self, path: str, **wanted: Any) -> Any:
        """Wait until a JSON document has these fields.

        Raises:
            AssertionError: it has not within ten seconds.
        """
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            document = self.get(path)
            if all(document[key] == value for key, value in wanted.items()):
                return document
            time.sleep(0.02)
        raise AssertionError(f"{path}: {document}, wanted {wanted}")

    def terminate(self, timeout_s: float = 15.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


@dataclass
class Simulated:
    """Starts simulated processes and ends them all."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="mooncake-simulated-")))
    time_scale: float = 50.0
    processes: list[SimulatedProcess] = field(default_factory=list)
    # One client: making one reads the machine's certificates, which takes longer than many a test.
    http: httpx.Client = field(
        # No connection is kept: to the drain of an engine without metrics, each of them is somebody waiting.
        default_factory=lambda: httpx.Client(
            timeout=10, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.processes:
            if one.process.poll() is None:
                one.kill()
        self.http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def engine(
        self,
        *flags: str,
        connector: Mapping[str, Any] | None = None,
        events: bool = False,
        base: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> SimulatedProcess:
        """Start an engine called `tiny` and wait until it serves."""
        base = base or free_ports(PORTS_A_POD)
        arguments = ["--model", "tiny", "--host", "127.0.0.1", "--port", str(base), "--block-size", "16"]
        arguments += ["--time-scale", str(self.time_scale), "--enable-prompt-tokens-details", *flags]
        if connector:
            arguments += ["--kv-transfer-config", json.dumps(connector)]
        if events:
            config = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{base + 4}",
                "replay_endpoint": f"tcp://127.0.0.1:{base + 5}",
                "topic": "kv-events",
            }
            arguments += ["--kv-events-config", json.dumps(config)]
        ports = {
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(base + 1),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(base + 2),
        }
        return self._start(
            "mooncake_simulator.engine", arguments, base, {**ports, **(environ or {})}, f"{base}/health"
        )

    def leader(self, base: int, nodes: int = 3) -> SimulatedProcess:
        """Start the leader of an engine called `tiny`; it serves when its workers are there."""
        arguments = ["--model", "tiny", "--host", "127.0.0.1", "--port", str(base), "--block-size", "16"]
        arguments += [*group_flags(base, 0, nodes), "--time-scale", str(self.time_scale)]
        return self._start("mooncake_simulator.engine", arguments, base, {})

    def worker(self, leader_base: int, rank: int, *flags: str, nodes: int = 2) -> SimulatedProcess:
        """Start a worker of an engine called `tiny` whose leader has, or will have, this block of ports."""
        base = free_ports(PORTS_A_POD)
        arguments = ["--model", "tiny", "--headless", "--block-size", "16", *flags]
        arguments += [*group_flags(leader_base, rank, nodes), "--time-scale", str(self.time_scale)]
        return self._start("mooncake_simulator.engine", arguments, base, {})

    def master(self, *flags: str, base: int | None = None) -> SimulatedProcess:
        """Start a store master: rpc on +0, admin on +1."""
        base = base or free_ports(PORTS_A_POD)
        arguments = ["master", "--host", "127.0.0.1", "--rpc-port", str(base)]
        arguments += ["--metrics-port", str(base + 1), *flags]
        return self._start("mooncake_simulator.store", arguments, base, {}, f"{base + 1}/health")

    def node(self, master: SimulatedProcess, *flags: str, size: str = "10GB") -> SimulatedProcess:
        """Start a store node and wait until it is mounted."""
        base = free_ports(PORTS_A_POD)
        arguments = ["node", "--host", "127.0.0.1", "--port", str(base), "--http-port", str(base + 1)]
        arguments += ["--global-segment-size", size, "--master-server-address", f"127.0.0.1:{master.base}"]
        arguments += ["--time-scale", str(self.time_scale), *flags]
        return self._start("mooncake_simulator.store", arguments, base, {}, f"{base + 1}/health")

    def store_environ(self, master: SimulatedProcess, **settings: Any) -> dict[str, str]:
        """The environment of an engine that uses the store of this master."""
        document = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{master.base}",
            "global_segment_size": 0,
            "local_buffer_size": "32MB",
            "protocol": "tcp",
            "device_name": "",
            **settings,
        }
        path = self.folder / f"mooncake-{len(list(self.folder.iterdir()))}.json"
        path.write_text(json.dumps(document))
        return {"MOONCAKE_CONFIG_PATH": str(path)}

    def _start(
        self,
        module: str,
        arguments: list[str],
        base: int,
        environ: Mapping[str, str],
        health: str | None = None,
    ) -> SimulatedProcess:
        log = self.folder / f"{base}-{len(self.processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **environ},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        one = SimulatedProcess(base, process, log, self.http)
        self.processes.append(one)
        if health is None:
            return one
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if self.http.get(f"http://127.0.0.1:{health}").status_code == 200:
                    return one
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"{module} does not serve:\n{log.read_text()}")
