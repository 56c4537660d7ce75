from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mooncake_core.blocks import block_keys
from mooncake_core.index import RedisIndex, Source, Stored, Tier
from mooncake_core.registry import Instance
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.redis import RedisServer
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.waiting import until

NAMESPACE = "gateway-test"


@asynccontextmanager
async def announced(redis: RedisServer, *instances: Instance) -> AsyncIterator[list[Instance]]:
    """The instances, registered and kept alive as their sidecars would."""
    registry = RedisRegistry(redis.url, namespace=NAMESPACE)
    registered = [await registry.register(instance) for instance in instances]

    async def beat() -> None:
        while True:
            for instance in registered:
                try:
                    await registry.heartbeat(instance.id, instance.epoch)
                except ConnectionError:
                    continue
                except Exception:
                    await registry.register(instance)
            await asyncio.sleep(0.3)

    beating = asyncio.create_task(beat())
    try:
        yield registered
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await registry.close()


@asynccontextmanager
async def scheduler(folder: Path, redis: RedisServer) -> AsyncIterator[Gateway]:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - one folder of a test
    async with gateway(
        folder, [], instances_file=None, redis_url=redis.url, namespace=NAMESPACE, profile="llama3-70b-8xa800"
    ) as running:
        await until(lambda: not running.scheduler.why_not_ready())
        yield running


async def test_the_memory_of_the_shared_index_is_told_beside_that_of_ones_own(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    only = ScriptedEngine("a")
    async with (
        engines(only),
        announced(redis_server, only.instance()),
        scheduler(tmp_path, redis_server) as running,
    ):

        async def told() -> bool:
            text = (await running.client.get("/metrics")).text
            return (
                'mooncake_index_bytes{where="redis"}' in text and 'mooncake_index_bytes{where="own"}' in text
            )

        await until(told)


async def test_what_sidecars_wrote_into_the_index_decides_placement(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    first, second = ScriptedEngine("a"), ScriptedEngine("b")
    async with (
        engines(first, second),
        announced(redis_server, first.instance(), second.instance()) as (_, holder),
        scheduler(tmp_path / "one", redis_server) as running,
    ):
        client = RespClient(redis_server.url)
        await client.connect()
        index = RedisIndex(client, namespace=NAMESPACE)
        source = Source(holder.id, holder.epoch)
        await index.attach(source)
        # What is tested is not how quick this machine is just now.
        running.scheduler.shared.index._timeout_s = 2.0  # type: ignore[union-attr]
        prompt = list(range(3200))
        await index.apply(source, [Stored(block_keys(prompt, 16), Tier.HBM)], 1)
        assert (await running.complete(prompt=prompt)).status_code == 200
        assert len(second.legs) == 1
        latest = running.scheduler.services.decisions.latest(1)[0]
        assert latest.index == "shared"
        assert latest.placement is not None
        assert latest.placement.prefix_tokens >= 3184
        await client.close()


async def test_two_schedulers_see_each_others_work(tmp_path: Path, redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    engine = ScriptedEngine("a")
    engine.usual = Act(hold=hold)
    async with (
        engines(engine),
        announced(redis_server, engine.instance()),
        scheduler(tmp_path / "one", redis_server) as one,
        scheduler(tmp_path / "two", redis_server) as two,
    ):
        sent = asyncio.ensure_future(one.complete())
        await engine.leg()
        await until(lambda: two.reserved == 1)
        hold.set()
        assert (await sent).status_code == 200
        await until(lambda: one.reserved == two.reserved == 0)


async def test_without_redis_requests_are_served_on_and_its_return_is_noticed(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = ScriptedEngine("a")
    async with (
        engines(engine),
        announced(redis_server, engine.instance()),
        scheduler(tmp_path / "one", redis_server) as running,
    ):
        prompt = list(range(64))
        assert (await running.complete(prompt=prompt)).status_code == 200
        redis_server.kill()
        for _ in range(4):
            assert (await running.complete(prompt=prompt)).status_code == 200
        services = running.scheduler.services
        latest = services.decisions.latest(1)[0]
        assert latest.index == "local"
        assert latest.placement is not None
        assert latest.placement.prefix_tokens >= 48
        assert any("Redis" in text for text in running.scheduler.degradations())
        assert "mooncake_degraded 1.0" in running.scheduler.metrics_text().decode()
        redis_server.restart()
        await until(lambda: not running.scheduler.shared.away)  # type: ignore[union-attr]
        await asyncio.sleep(1.1)
        assert (await running.complete(prompt=prompt)).status_code == 200
        assert services.decisions.latest(1)[0].index == "shared"
        await running.settled()


async def test_a_redis_that_hangs_delays_no_request_for_long(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = ScriptedEngine("a")
    async with (
        engines(engine),
        announced(redis_server, engine.instance()),
        scheduler(tmp_path / "one", redis_server) as running,
    ):
        redis_server.pause()
        try:
            answers = [await running.complete() for _ in range(5)]
            assert {answer.status_code for answer in answers} == {200}
            assert running.scheduler.services.decisions.latest(1)[0].index == "local"
        finally:
            redis_server.resume()


async def test_a_scheduler_that_starts_without_redis_serves_once_it_is_there(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = ScriptedEngine("a")
    redis_server.kill()
    async with (
        engines(engine),
        gateway(
            tmp_path, [], instances_file=None, redis_url=redis_server.url, namespace=NAMESPACE
        ) as running,
    ):
        assert (await running.complete()).status_code == 503
        redis_server.restart()
        async with announced(redis_server, engine.instance()):
            await until(lambda: not running.scheduler.why_not_ready())
            assert (await running.complete()).status_code == 200
