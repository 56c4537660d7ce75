"""What every test of sidecars beside real processes needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_testing.redis import RedisServer
from mooncake_testing.sidecars import SharedView, SidecarProcess
from mooncake_testing.simulated import Simulated, SimulatedProcess


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    with Simulated() as processes:
        yield processes


@pytest.fixture
def start_sidecar(tmp_path: Path, redis_server: RedisServer) -> Iterator[Callable[..., SidecarProcess]]:
    """Starts sidecars beside engines; at the end they are ended, and none may have left a traceback."""
    started: list[SidecarProcess] = []

    def begin(engine: SimulatedProcess, **settings: Any) -> SidecarProcess:
        started.append(SidecarProcess(tmp_path, redis_server, engine.url, **settings))
        return started[-1]

    yield begin
    for one in started:
        one.end()
        assert "Traceback" not in one.log(), one.log()


@pytest.fixture
async def shared(redis_server: RedisServer) -> AsyncIterator[SharedView]:
    view = SharedView(redis_server)
    await view.open()
    yield view
    await view.close()
