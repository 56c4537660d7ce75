"""Redis goes, as with the node that is drained, and then engines: schedulers must hear of it all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.registry import InstanceState
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.ports import free_port
from mooncake_testing.redis import RedisServer
from mooncake_testing.sidecars import NAMESPACE, SidecarProcess
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import until

Start = Callable[..., SidecarProcess]
NAMES = ("b-0", "b-1")


class Fleet:
    """Two engines with sidecars, a Redis, and a scheduler that knows both."""

    def __init__(
        self,
        running: Gateway,
        engines: dict[str, SimulatedProcess],
        sidecars: dict[str, SidecarProcess],
        redis: RedisServer,
    ) -> None:
        self.running = running
        self.engines = engines
        self.sidecars = sidecars
        self.redis = redis
        self.statuses: list[int] = []

    def state(self, name: str) -> InstanceState | None:
        member = self.running.scheduler.services.roster.members.get(name)
        return None if member is None else member.state

    async def redis_goes(self) -> None:
        self.redis.kill()
        await until(lambda: self.running.scheduler.services.roster.registry_away)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Streams, one after another; `statuses` gets one of each."""
        stopping = asyncio.Event()

        async def client() -> None:
            while not stopping.is_set():
                answer = await self.running.complete(stream=True, max_tokens=30)
                whole = answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
                self.statuses.append(answer.status_code if whole else 0)

        clients = [asyncio.create_task(client()) for _ in range(4)]
        try:
            yield
        finally:
            stopping.set()
            await asyncio.gather(*clients)

    async def more(self, answers: int) -> None:
        wanted = len(self.statuses) + answers
        await until(lambda: len(self.statuses) >= wanted)


@pytest.fixture
async def fleet(
    simulated: Simulated, start_sidecar: Start, redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Fleet]:
    engines, sidecars = {}, {}
    for name in NAMES:
        engine = engines[name] = simulated.engine()
        (tmp_path / name).mkdir()
        port = free_port()
        settings: dict[str, Any] = {
            "instance": name,
            "role": "both",
            "journal_dir": str(tmp_path / name),
            "listen": {"host": "127.0.0.1", "port": port},
            "advertised_admin_url": f"http://127.0.0.1:{port}",
        }
        sidecars[name] = start_sidecar(engine, **settings)
    async with gateway(tmp_path, [], redis_url=redis_server.url, namespace=NAMESPACE) as running:
        fleet = Fleet(running, engines, sidecars, redis_server)
        await until(lambda: all(fleet.state(name) is InstanceState.READY for name in NAMES))
        yield fleet


async def test_an_engine_that_is_drained_while_redis_is_away_gets_no_more_work_before_it_ends(
    fleet: Fleet,
) -> None:
    async with fleet.load():
        await fleet.more(8)
        await fleet.redis_goes()
        draining = fleet.sidecars["b-0"].drain()
        await until(lambda: fleet.state("b-0") is InstanceState.DRAINING)
        said, _ = await asyncio.to_thread(draining.communicate, timeout=60)
        assert draining.returncode == 0, said
        served = fleet.running.scheduler.services.roster.members["b-0"].requests
        fleet.engines["b-0"].kill()
        fleet.sidecars["b-0"].end()
        await fleet.more(20)
        assert fleet.running.scheduler.services.roster.members["b-0"].requests == served
    assert set(fleet.statuses) == {200}


async def test_an_engine_that_is_gone_without_a_word_is_out_of_reach_until_the_registry_knows_better(
    fleet: Fleet,
) -> None:
    await fleet.redis_goes()
    fleet.engines["b-0"].kill()
    fleet.sidecars["b-0"].end()
    async with fleet.load():
        await until(lambda: fleet.state("b-0") is InstanceState.UNREACHABLE)
        await fleet.more(8)
        fleet.redis.restart()
        await until(lambda: fleet.state("b-0") is None)
        await fleet.more(8)
    assert set(fleet.statuses) == {200}
    assert fleet.state("b-1") is InstanceState.READY


async def test_whoever_answers_again_is_used_again_though_the_registry_is_still_away(fleet: Fleet) -> None:
    await fleet.redis_goes()
    sidecar = fleet.sidecars["b-0"]
    sidecar.kill()
    await until(lambda: fleet.state("b-0") is InstanceState.UNREACHABLE)
    sidecar.start()
    await until(lambda: fleet.state("b-0") is InstanceState.READY)
    assert (await fleet.running.complete()).status_code == 200


async def test_a_redis_that_hung_is_no_longer_told_of_once_it_answers_though_nobody_asks_for_anything(
    fleet: Fleet,
) -> None:
    scheduler = fleet.running.scheduler
    async with fleet.load():
        await fleet.more(8)
        fleet.redis.pause()
        await until(lambda: scheduler.services.residency.mode == "local")
    assert scheduler.degradations()
    fleet.redis.resume()
    await until(lambda: not scheduler.degradations())
