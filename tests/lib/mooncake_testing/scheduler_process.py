"""Schedulers as real processes, and instances that announce themselves to them through Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from mooncake_core.registry import EngineReport, Instance
from mooncake_core.registry.redis import RedisRegistry
from mooncake_testing.ports import free_port
from mooncake_testing.redis import RedisServer

NAMESPACE = "test"


class SchedulerProcess:
    """One `python -m mooncake_scheduler`; `ready` waits until it serves.

    Args:
        folder: for its configuration and its log.
        name: of these files.
        open_files: limit with which it starts, as a shell sets it; None = the test's own.
        settings: of its configuration.
    """

    def __init__(
        self, folder: Path, name: str = "scheduler", *, open_files: int | None = None, **settings: Any
    ) -> None:
        self.serving_port, self.admin_port = free_port(), free_port()
        self._config = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        limited = f'ulimit -Sn {open_files} && exec "$0" "$@"'
        self._in_shell = [] if open_files is None else ["sh", "-c", limited]
        known: dict[str, Any] = {
            "cluster": "test", "model": "tiny", "namespace": NAMESPACE,
            "serving": {"host": "127.0.0.1", "port": self.serving_port},
            "admin": {"host": "127.0.0.1", "port": self.admin_port},
            "routing": {"policy": "kv-centric"}, "admission": {"mode": "none"},
        }  # fmt: skip
        self._config.write_text(json.dumps(known | settings))
        self.start()

    def start(self) -> None:
        """Start the process (again, on the same ports)."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._in_shell, sys.executable, "-m", "mooncake_scheduler", "--config", str(self._config)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        """Base URL of the serving port."""
        return f"http://127.0.0.1:{self.serving_port}"

    async def ready(self, timeout_s: float = 30.0) -> None:
        """Wait until requests can be served.

        Raises:
            AssertionError: the process ended, or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
            while time.monotonic() < deadline and self.process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.05)
        raise AssertionError(f"the scheduler does not serve:\n{self.log()}")

    def rss_bytes(self) -> int:
        """Memory that it has resident."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """SIGTERM, without waiting for the end."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End it, however it stands."""
        if self.process.poll() is None:
            self.kill()


class Announced:
    """Instances kept alive in the registry, as their sidecars would."""

    def __init__(self, registry: RedisRegistry, instances: dict[str, Instance]) -> None:
        self.registry = registry
        self.instances = instances
        self.reports: dict[str, EngineReport] = {}
        """What each says of its engine with every heartbeat."""

    async def beat(self) -> None:
        """One heartbeat of each."""
        for instance in list(self.instances.values()):
            with contextlib.suppress(ConnectionError):
                await self.registry.heartbeat(instance.id, instance.epoch, self.reports.get(instance.id))


@asynccontextmanager
async def announced(redis: RedisServer, instances: Sequence[Instance]) -> AsyncIterator[Announced]:
    """Register instances and keep them alive."""
    registry = RedisRegistry(redis.url, namespace=NAMESPACE)
    there = Announced(registry, {each.id: await registry.register(each) for each in instances})

    async def keep_alive() -> None:
        while True:
            await there.beat()
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(keep_alive())
    try:
        yield there
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await registry.close()
