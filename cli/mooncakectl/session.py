"""One local cluster from its manifest to its end: what `up` and `demo` have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncakectl.console import say
from mooncakectl.local import Folders, LocalRuntime
from mooncakectl.local.cluster import Definition, LocalCluster, plan_local, stop_wave
from mooncakectl.local.ports import PortBlocks, held_port
from mooncakectl.local.supervision import EventSink

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class Session:
    """A cluster that was started."""

    cluster: LocalCluster
    runtime: LocalRuntime

    async def drain_and_stop(self) -> None:
        """Let work in flight end, then stop everything; `runtime.kill()` cuts it short."""
        await self.runtime.stop(stop_wave)


@asynccontextmanager
async def started(
    definition: Definition, *, port: int | None, secrets_dir: Path | None, on_event: EventSink
) -> AsyncIterator[Session]:
    """Start a cluster's processes; leaving ends those that still run.

    Args:
        definition: the cluster.
        port: where clients reach it; None = 8000, or the next free one, with a remark.
        secrets_dir: Secrets that the manifest does not hold.
        on_event: told what happens to containers.

    Raises:
        LocalRuntimeError: the cluster is up already, or cannot run on this machine.
    """
    # Around the runtime, so that ports are let go of when nothing of it runs any more.
    with PortBlocks(definition.name) as blocks:
        async with LocalRuntime(Folders.of(definition.name), on_event=on_event) as runtime:
            if runtime.leftovers_ended:
                say(f"ended {runtime.leftovers_ended} processes that a killed mooncakectl had left running")
            with held_port(DEFAULT_PORT) if port is None else held_port(port, tries=1) as serving_port:
                if port is None and serving_port != DEFAULT_PORT:
                    say(
                        f"port {DEFAULT_PORT} is taken: clients reach the cluster on {serving_port} "
                        "(--port chooses another one)"
                    )
                cluster = plan_local(definition, blocks, serving_port=serving_port, secrets_dir=secrets_dir)
                runtime.start(cluster.world)
                runtime.announce(endpoint=cluster.endpoint, admin_urls=cluster.admin_urls)
                yield Session(cluster, runtime)


async def first_of(*tasks: asyncio.Task[None]) -> None:
    """Wait for the first of these, and cancel the others; what went wrong in any of them is raised."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
