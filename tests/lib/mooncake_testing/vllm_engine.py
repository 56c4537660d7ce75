"""Real vLLM engines on CPU with a tiny model, as the test-engines stage runs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mooncake_testing.engine_exchange import EnginePair
from mooncake_testing.vllm_environment import EngineEnvironment

MODEL_MAKER = Path(__file__).parents[2] / "engines" / "make_tiny_model.py"
BLOCK_SIZE_TOKENS = 32
READY_S = 300


def ensure_tiny_model(environment: EngineEnvironment, folder: Path) -> Path:
    """The tiny model's folder, made when it is not there."""
    if not (folder / "model.safetensors").exists():
        subprocess.check_call(
            [str(environment.python), str(MODEL_MAKER), str(folder)],
            env=environment.variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return folder


@dataclass
class VllmEngine:
    """One `vllm serve`, listening on loopback."""

    environment: EngineEnvironment
    model: Path
    port: int
    log: Path
    served_model_name: str = "tiny"
    kv_role: Literal["", "kv_producer", "kv_consumer", "kv_both"] = ""
    bootstrap_port: int = 0
    events_port: int = 0
    replay_port: int = 0
    blocks: int = 256
    max_model_len_tokens: int = 2048
    arguments: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The command line."""
        line = [str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        line += ["--model", str(self.model), "--served-model-name", self.served_model_name]
        line += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        line += ["--max-model-len", str(self.max_model_len_tokens), "--max-num-seqs", "8"]
        line += ["--block-size", str(BLOCK_SIZE_TOKENS), "--num-gpu-blocks-override", str(self.blocks)]
        line += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        if self.kv_role:
            transfer = {
                "kv_connector": "MooncakeConnector", "kv_role": self.kv_role,
                "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
            }  # fmt: skip
            line += ["--kv-transfer-config", json.dumps(transfer)]
        if self.events_port:
            events = {
                "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events",
                "endpoint": f"tcp://*:{self.events_port}", "replay_endpoint": f"tcp://*:{self.replay_port}",
            }  # fmt: skip
            line += ["--kv-events-config", json.dumps(events)]
        return line + self.arguments

    def start(self) -> None:
        """Start it; `wait_ready` tells when it serves."""
        variables = self.environment.variables()
        variables["PYTHONHASHSEED"] = "0"
        if self.bootstrap_port:
            variables["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(self.bootstrap_port)
        variables["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = "20"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Until /health answers 200, or raise with the end of the log."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"vLLM on port {self.port} is not ready:\n{self.log.read_text()[-4000:]}")

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """End it and the processes it started (its own session)."""
        if self.process is None:
            return
        self.process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


@dataclass(frozen=True)
class VllmPair:
    """A running prefill and decode engine."""

    prefill: VllmEngine
    decode: VllmEngine

    def addresses(self) -> EnginePair:
        """Where the scripted exchange finds them."""
        return EnginePair(
            prefill_url=self.prefill.url,
            decode_url=self.decode.url,
            bootstrap_url=f"http://127.0.0.1:{self.prefill.bootstrap_port}",
            events_endpoint=f"tcp://127.0.0.1:{self.prefill.events_port}",
            replay_endpoint=f"tcp://127.0.0.1:{self.prefill.replay_port}",
        )
