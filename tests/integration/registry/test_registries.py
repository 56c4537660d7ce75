"""What a registry must do, in memory and on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mooncake_core.registry import (
    EngineReport,
    Instance,
    InstanceState,
    MemoryRegistry,
    Registry,
    Role,
    StaleEpochError,
)
from mooncake_core.registry.redis import RedisRegistry
from mooncake_testing.redis import RedisServer
from mooncake_testing.waiting import until

TTL_S = 0.4
Opener = Callable[[], Awaitable[Registry]]


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    if request.param == "memory":
        yield MemoryRegistry(ttl_s=TTL_S)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    opened = RedisRegistry(server.url, namespace="test", ttl_s=TTL_S)
    yield opened
    await opened.close()


def instance(name: str = "a", **changes: object) -> Instance:
    fields: dict[str, object] = {
        "id": name,
        "role": Role.PREFILL,
        "url": f"http://{name}:8000",
        "max_batch": 8,
    }
    return Instance(**(fields | changes))  # type: ignore[arg-type]


async def test_a_registered_instance_is_listed_as_it_announced_itself(registry: Registry) -> None:
    announced = await registry.register(instance("b", kv_capacity_tokens=1_400_000, topology_domain="rack-1"))
    await registry.register(instance("a"))
    a, b = await registry.instances()
    assert (a.id, b) == ("a", announced)
    assert b.epoch == 1


async def test_each_registration_begins_a_new_epoch(registry: Registry) -> None:
    epochs = [(await registry.register(instance())).epoch for _ in range(3)]
    assert epochs == [1, 2, 3]
    assert [i.epoch for i in await registry.instances()] == [3]


async def test_many_registrations_at_once_get_as_many_epochs(registry: Registry) -> None:
    registered = await asyncio.gather(*(registry.register(instance()) for _ in range(50)))
    assert {i.epoch for i in registered} == set(range(1, 51))


async def test_a_life_that_went_on_keeps_its_epoch(registry: Registry) -> None:
    first = await registry.register(instance())
    await registry.deregister("a", first.epoch)
    assert (await registry.register(instance(), resume_epoch=first.epoch)).epoch == first.epoch


async def test_a_life_that_another_replaced_is_not_resumed(registry: Registry) -> None:
    first = await registry.register(instance())
    second = await registry.register(instance())
    assert (await registry.register(instance(), resume_epoch=first.epoch)).epoch == second.epoch + 1


async def test_an_epoch_that_the_registry_forgot_is_not_given_again(registry: Registry) -> None:
    assert (await registry.register(instance(epoch=41))).epoch == 42
    assert (await registry.register(instance("b"), resume_epoch=7)).epoch == 7


async def test_who_joins_a_live_record_leaves_it_as_it_is(registry: Registry) -> None:
    first = await registry.join(instance("store", role=Role.STORE))
    assert await registry.join(instance("store", role=Role.STORE, url="http://other")) == first
    await registry.deregister("store", first.epoch)
    assert (await registry.join(instance("store", role=Role.STORE))).epoch == first.epoch + 1


async def test_heartbeats_keep_an_instance_and_silence_ends_it(registry: Registry) -> None:
    kept = await registry.register(instance("kept"))
    silent = await registry.register(instance("silent"))
    for _ in range(6):
        await asyncio.sleep(TTL_S / 4)
        await registry.heartbeat("kept", kept.epoch)
    assert [i.id for i in await registry.instances()] == ["kept"]
    with pytest.raises(StaleEpochError):
        await registry.heartbeat("silent", silent.epoch)


async def test_a_heartbeat_of_a_replaced_life_is_refused(registry: Registry) -> None:
    old = await registry.register(instance())
    await registry.register(instance())
    with pytest.raises(StaleEpochError):
        await registry.heartbeat("a", old.epoch)


async def test_a_late_goodbye_does_not_remove_the_successor(registry: Registry) -> None:
    old = await registry.register(instance())
    new = await registry.register(instance())
    await registry.deregister("a", old.epoch)
    assert [i.epoch for i in await registry.instances()] == [new.epoch]
    await registry.deregister("a", new.epoch)
    assert list(await registry.instances()) == []


async def test_a_drain_mark_reaches_whoever_keeps_the_instance_alive(registry: Registry) -> None:
    there = await registry.register(instance())
    assert await registry.heartbeat("a", there.epoch) is InstanceState.READY
    assert await registry.mark("a", InstanceState.DRAINING)
    assert await registry.heartbeat("a", there.epoch) is InstanceState.DRAINING
    assert [(i.state, i.max_batch) for i in await registry.instances()] == [(InstanceState.DRAINING, 8)]
    assert await registry.mark("a", InstanceState.READY)
    assert [i.state for i in await registry.instances()] == [InstanceState.READY]
    assert not await registry.mark("nobody", InstanceState.DRAINING)


async def test_the_last_report_of_a_live_instance_is_kept(registry: Registry) -> None:
    there = await registry.register(instance())
    assert await registry.reports() == {}
    report = EngineReport(running=3, waiting=1, kv_usage=0.25, at_s=12.5)
    await registry.heartbeat("a", there.epoch, report)
    await registry.heartbeat("a", there.epoch)
    assert await registry.reports() == {"a": report}
    await registry.register(instance())
    assert await registry.reports() == {}


async def test_a_poll_sees_changes_made_by_others(redis_server: RedisServer) -> None:
    mine = RedisRegistry(redis_server.url, namespace="test")
    theirs = RedisRegistry(redis_server.url, namespace="test")
    other_cluster = RedisRegistry(redis_server.url, namespace="elsewhere")
    assert list(await mine.instances()) == []
    await theirs.register(instance("a"))
    assert [i.id for i in await mine.instances()] == ["a"]
    assert await mine.instances() == await mine.instances()
    await theirs.mark("a", InstanceState.DRAINING)
    assert [i.state for i in await mine.instances()] == [InstanceState.DRAINING]
    assert list(await other_cluster.instances()) == []
    for each in (mine, theirs, other_cluster):
        await each.close()


async def test_without_redis_calls_fail_as_connection_errors_and_work_again_after_it_is_back(
    redis_server: RedisServer,
) -> None:
    registry = RedisRegistry(redis_server.url, namespace="test", timeout_s=0.5)
    there = await registry.register(instance())
    redis_server.kill()
    for call in (registry.instances, registry.reports, lambda: registry.register(instance())):
        with pytest.raises(ConnectionError):
            await call()
    redis_server.restart()
    with pytest.raises(StaleEpochError):
        await registry.heartbeat("a", there.epoch)
    assert (await registry.register(there, resume_epoch=there.epoch)).epoch == there.epoch
    assert [i.id for i in await registry.instances()] == ["a"]
    await registry.close()


async def test_a_redis_that_hangs_counts_as_away(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, namespace="test", timeout_s=0.2)
    await registry.register(instance())
    redis_server.pause()
    with pytest.raises(ConnectionError):
        await registry.instances()
    redis_server.resume()
    await registry.close()


async def test_a_redis_that_lost_its_memory_empties_no_list_at_once(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, namespace="test", ttl_s=TTL_S)
    a, b = await registry.register(instance("a")), await registry.register(instance("b"))
    assert list(await registry.instances()) == [a, b]
    redis_server.restart()
    assert list(await registry.instances()) == [a, b]
    again = await registry.register(instance("b", url="http://elsewhere:8000", epoch=b.epoch))
    assert list(await registry.instances()) == [a, again]
    await registry.deregister("b", again.epoch)
    await asyncio.sleep(TTL_S)
    assert list(await registry.instances()) == []
    await registry.close()


async def test_the_registry_leaves_a_primary_that_was_demoted(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, namespace="test", ttl_s=30)
    await registry.register(instance())
    with redis_server.client() as admin:
        connection = admin.client_id()
        admin.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(ConnectionError, match=r"(?i)read only"):
                await registry.register(instance())
            # A new connection may lead to the new primary, those that were there never will.
            await until(lambda: {each["id"] for each in admin.client_list()} == {str(connection)})
        finally:
            admin.replicaof("NO", "ONE")
    await registry.register(instance())
    await registry.close()


async def test_a_record_that_a_newer_version_wrote_hides_no_other(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, namespace="test", ttl_s=30)
    await registry.register(instance("a"))
    strange = await registry.register(instance("strange"))
    await registry.register(instance("z"))
    await registry.heartbeat("z", 1, EngineReport(running=1))
    with redis_server.client() as admin:
        prefix = "mc:{test}:registry:"
        admin.hset(f"{prefix}records", "strange", '{"id": "strange", "role": "oracle", "url": ""}')
        admin.hset(f"{prefix}reports", "strange", '{"running": "many"}')
        admin.set(f"{prefix}version", "changed")
    assert [each.id for each in await registry.instances()] == ["a", "z"]
    assert set(await registry.reports()) == {"z"}
    assert await registry.heartbeat("strange", strange.epoch) is InstanceState.READY
    with pytest.raises(ConnectionError, match=r"record of strange cannot be read: .*role"):
        await registry.join(instance("strange"))
    await registry.close()


async def test_a_cancellation_ends_who_asks_it_whenever_it_comes(registry: Registry) -> None:
    async def ask_for_ever() -> None:
        while True:
            await registry.instances()
            await asyncio.sleep(0)

    await registry.instances()
    for turns in range(200):
        asking = asyncio.create_task(ask_for_ever())
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking}, timeout=5)
        assert asking.cancelled(), f"it goes on after a cancellation {turns % 20} turns into it"
