"""A whole scheduler in the test's own loop, in front of scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from mooncake_core.config.scheduler import SchedulerConfig
from mooncake_core.registry import Instance
from mooncake_scheduler.app import Scheduler
from mooncake_scheduler.assembly import build_scheduler
from mooncake_testing.ports import free_port
from mooncake_testing.waiting import until


class Gateway:
    """A running scheduler and a client to it."""

    def __init__(self, scheduler: Scheduler, client: httpx.AsyncClient) -> None:
        self.scheduler = scheduler
        self.client = client
        self.url = str(client.base_url).rstrip("/")
        self.port = scheduler.serving_port

    async def complete(self, **fields: Any) -> httpx.Response:
        """A completion that is not streamed."""
        body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 4} | fields
        return await self.client.post("/v1/completions", json=body)

    async def stream(self, **fields: Any) -> str:
        """The whole text of a streamed completion, events and all."""
        return (await self.complete(stream=True, **fields)).text

    async def settled(self) -> None:
        """Until nothing is in flight; then nothing may be reserved."""
        await until(lambda: not self.scheduler.datapath.flows)
        assert self.reserved == 0

    @property
    def reserved(self) -> int:
        """Requests that hold a reservation."""
        services = self.scheduler.services
        loads = services.ledger.loads(services.clock.now_s())
        return sum(load.batch + load.arriving for load in loads.values())


def write_instances(path: Path, instances: Sequence[Instance]) -> None:
    """Write an instances file."""
    path.write_bytes(msgspec.json.encode(list(instances)))


@asynccontextmanager
async def gateway(folder: Path, instances: Sequence[Instance], **settings: Any) -> AsyncIterator[Gateway]:
    """Run a scheduler in front of these instances, state in memory."""
    file = folder / "instances.json"
    write_instances(file, instances)
    known: dict[str, Any] = {
        "cluster": "test", "model": "tiny", "instances_file": str(file),
        "serving": {"host": "127.0.0.1", "port": free_port()},
        "admin": {"host": "127.0.0.1", "port": free_port()},
        "routing": {"policy": "kv-centric", "seed": 1}, "admission": {"mode": "none"},
    }  # fmt: skip
    scheduler = build_scheduler(SchedulerConfig.model_validate(known | settings))
    await scheduler.start()
    url = f"http://127.0.0.1:{scheduler.serving_port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield Gateway(scheduler, client)
    finally:
        await scheduler.stop(streams_s=0.2)
