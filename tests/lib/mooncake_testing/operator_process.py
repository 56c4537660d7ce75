"""The operator as a process of its own, as its image runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mooncake_testing.ports import free_port


class OperatorProcess:
    """`python -m mooncake_operator`, with its logs kept."""

    def __init__(self, kubeconfig: Path, directory: Path, **settings: str | int | float) -> None:
        """Start it; `settings` are fields of its `Settings`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.metrics_port, self.health_port = free_port(), free_port()
        self.log = directory / "operator.log"
        chosen = {
            "listen": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "health_port": self.health_port,
            **settings,
        }
        environment = {f"MOONCAKE_OPERATOR_{name.upper()}": str(value) for name, value in chosen.items()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mooncake_operator"],
                env=os.environ | {"KUBECONFIG": str(kubeconfig)} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Its log so far; every line must be a JSON object."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one kind."""
        return [line for line in self.lines() if line["event"] == event]

    def metric(self, name: str) -> float | None:
        """Sum of a metric's samples; None while it does not answer or has none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        samples = [
            line.rsplit(" ", 1)[1] for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        ]
        return sum(map(float, samples)) if samples else None

    def health(self) -> int:
        """Status of its liveness probe; 0 while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def leads(self) -> bool:
        """Whether it holds the Lease."""
        return self.metric("mooncake_leader") == 1.0

    def stop(self, *, wait_s: float = 40) -> int:
        """SIGTERM; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(wait_s)

    def wait(self, seconds: float = 40) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """kill -9, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
