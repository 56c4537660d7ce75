"""Sidecars as real processes, and looks at what they have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx

from mooncake_core.index import Depth, RedisIndex
from mooncake_core.registry import Instance
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient
from mooncake_testing.ports import free_port
from mooncake_testing.redis import RedisServer

NAMESPACE = "test"


class SidecarProcess:
    """A sidecar beside an engine; it may be killed and started again, its journal stays."""

    def __init__(self, folder: Path, redis: RedisServer, engine_url: str, **settings: Any) -> None:
        self.folder = folder
        self.port = free_port()
        self.config: dict[str, Any] = {
            "instance": "engine-0",
            "cluster": "c",
            "namespace": NAMESPACE,
            "pool": "prefill",
            "role": "prefill",
            "model": "tiny",
            "engine": "Simulated",
            "engine_url": engine_url,
            "advertised_url": engine_url,
            "listen": {"host": "127.0.0.1", "port": self.port},
            "redis_url": redis.url,
            "journal_dir": str(folder / "journal"),
            "heartbeat_s": 0.2,
            "drain_timeout_s": 20,
        } | settings
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Base URL of its HTTP."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which it runs."""
        return {**os.environ, "MOONCAKE_SIDECAR_CONFIG": json.dumps(self.config)}

    def start(self) -> None:
        """Start the process (again)."""
        with (self.folder / f"{self.config['instance']}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mooncake_sidecar.engine"],
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def drain(self) -> subprocess.Popen[bytes]:
        """Run the preStop command beside it."""
        return subprocess.Popen(
            [sys.executable, "-m", "mooncake_sidecar.engine", "drain"],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def end(self) -> None:
        """End it, however it stands."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def status(self) -> dict[str, Any]:
        """Its own account; empty while it does not answer."""
        try:
            document: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=2, trust_env=False).json()
        except httpx.TransportError:
            return {}
        return document

    def metric(self, name: str) -> float:
        """One of its metrics without labels.

        Raises:
            ConnectionError: it does not answer.
            KeyError: there is no such metric.
        """
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=2, trust_env=False).text
        except httpx.TransportError as error:
            raise ConnectionError(str(error)) from error
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return float(values[name])

    def log(self) -> str:
        """What it has logged in all its lives."""
        return (self.folder / f"{self.config['instance']}.log").read_text()


class SharedView:
    """What schedulers would see: registry and index on the same Redis."""

    def __init__(self, redis: RedisServer) -> None:
        self._client = RespClient(redis.url)
        self.index = RedisIndex(self._client, namespace=NAMESPACE, timeout_s=2.0)
        self.registry = RedisRegistry(redis.url, namespace=NAMESPACE)

    async def open(self) -> None:
        """Connect."""
        await self._client.connect()

    async def close(self) -> None:
        """Disconnect."""
        await self.registry.close()
        await self._client.close()

    async def instance(self, name: str) -> Instance | None:
        """A registered instance."""
        return next((i for i in await self.registry.instances() if i.id == name), None)

    async def depth(self, keys: Sequence[int], holder: str) -> Depth:
        """How deep a holder knows a prefix."""
        return (await self.index.match(keys)).get(holder, Depth(0, 0, 0))

    async def held(self, keys: Iterable[int], holder: str, *, tier: int = 0) -> set[int]:
        """Which of these blocks a holder has in HBM (tier 0), up to DRAM (1), or anywhere (2), one by one."""
        keys = list(keys)
        matches = await self.index.match_many([[key] for key in keys])
        found = zip(keys, matches, strict=True)
        return {key for key, match in found if match.get(holder, Depth(0, 0, 0))[tier]}
