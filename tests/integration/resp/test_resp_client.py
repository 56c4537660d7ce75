import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from mooncake_core.resp import Address, DeadlineError, DemotedError, ReplyError, RespClient, Script
from mooncake_testing.redis import RedisServer, start_redis
from mooncake_testing.service import Service
from mooncake_testing.waiting import until


@asynccontextmanager
async def listening(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[str]:
    """A server that is no Redis, by its URL; leaves when all have been answered."""
    answering: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(answer(reader, writer))
        answering.add(task)
        await asyncio.wait([task])

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await asyncio.gather(*answering, return_exceptions=True)


async def test_many_callers_share_one_connection_and_each_gets_its_own_reply(client: RespClient) -> None:
    replies = await asyncio.gather(*(client.call(b"ECHO", str(n)) for n in range(500)))
    assert replies == [str(n).encode() for n in range(500)]
    assert (await client.call(b"CLIENT", b"LIST")).count(b"\n") == 1


async def test_an_error_reply_reaches_its_caller_and_nobody_else(client: RespClient) -> None:
    results = await asyncio.gather(
        client.call(b"SET", b"k", b"v"),
        client.call(b"LPUSH", b"k", b"v"),
        client.call(b"GET", b"k"),
        return_exceptions=True,
    )
    assert results[0] == b"OK"
    assert isinstance(results[1], ReplyError)
    assert results[1].code == "WRONGTYPE"
    assert results[2] == b"v"


async def test_many_commands_in_one_write_answer_in_order_and_raise_the_first_error(
    client: RespClient,
) -> None:
    assert await client.call_many([]) == []
    assert await client.call_many([(b"SET", b"a", b"1"), (b"INCR", b"a"), (b"GET", b"a")]) == [b"OK", 2, b"2"]
    with pytest.raises(ReplyError, match="unknown command"):
        await client.call_many([(b"NONSENSE",), (b"INCR", b"a")])
    assert await client.call(b"GET", b"a") == b"3"


async def test_a_large_command_and_a_large_reply_pass_whole(client: RespClient) -> None:
    value = bytes(range(256)) * 40_000
    await client.call(b"SET", b"big", value)
    assert await client.call(b"GET", b"big") == value


async def test_a_forgotten_command_is_carried_out_and_its_error_counted(client: RespClient) -> None:
    client.send_nowait(b"SET", b"k", b"v")
    client.send_nowait(b"LPUSH", b"k", b"v")
    assert await client.call(b"GET", b"k") == b"v"
    assert client.posted_errors == 1


async def test_a_script_runs_again_after_redis_forgot_it(client: RespClient) -> None:
    script = Script("return {KEYS[1], ARGV[1]}")
    assert await client.eval(script, [b"k"], [b"x"]) == [b"k", b"x"]
    await client.call(b"SCRIPT", b"FLUSH")
    assert await client.eval(script, [b"k"], [b"y"]) == [b"k", b"y"]
    assert await client.call(b"SCRIPT", b"EXISTS", script.sha) == [1]


async def test_a_hanging_redis_costs_a_call_its_budget_and_late_replies_are_not_mixed_up(
    client: RespClient, redis_server: RedisServer
) -> None:
    redis_server.pause()
    waits = [client.call(b"ECHO", b"late", timeout_s=0.02 + n / 1000) for n in range(5)]
    patient = asyncio.create_task(client.call(b"ECHO", b"patient", timeout_s=20))
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineError] * 5
    redis_server.resume()
    assert await patient == b"patient"
    assert await client.call(b"ECHO", b"next") == b"next"


async def test_a_cancelled_call_leaves_the_next_reply_to_the_next_caller(client: RespClient) -> None:
    task = asyncio.create_task(client.call(b"ECHO", b"cancelled"))
    await asyncio.sleep(0)
    task.cancel()
    assert await client.call(b"ECHO", b"next") == b"next"


async def test_a_redis_that_hangs_for_long_is_given_up_and_found_again(redis_server: RedisServer) -> None:
    client = RespClient(redis_server.url, stall_s=0.1)
    await client.connect()
    redis_server.pause()
    with pytest.raises(DeadlineError):
        await client.call(b"PING", timeout_s=0.01)
    await until(lambda: not client.connected)
    redis_server.resume()
    await until(lambda: client.connected)
    assert await client.call(b"PING") == b"PONG"
    await client.close()


async def test_a_killed_redis_fails_calls_at_once_and_its_successor_is_noticed(
    client: RespClient, redis_server: RedisServer
) -> None:
    seen: list[str] = []
    client.on_new_server = seen.append
    first = client.run_id
    await client.call(b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"no")
    await until(lambda: client.connected)
    assert (seen, client.run_id) == ([], first), "the same process was taken for a new one"

    redis_server.pause()
    pending = asyncio.create_task(client.call(b"PING", timeout_s=30))
    await asyncio.sleep(0.01)
    redis_server.kill()
    with pytest.raises(ConnectionError):
        await pending
    with pytest.raises(ConnectionError, match="not connected"):
        await client.call(b"PING")
    with pytest.raises(ConnectionError):
        client.send_nowait(b"PING")
    redis_server.restart()
    await until(lambda: client.connected)
    assert seen == [client.run_id]
    assert client.run_id != first
    assert await client.call(b"PING") == b"PONG"


async def test_a_primary_that_was_demoted_is_left_for_its_successor(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    successor = start_redis(tmp_path)
    async with Service(redis_server.port) as service:
        client = RespClient(f"redis://127.0.0.1:{service.port}")
        await client.connect()
        await client.call(b"SET", b"k", b"v")
        with redis_server.client() as admin:
            admin.replicaof("127.0.0.1", successor.port)
            service.leads_to = successor.port
            with pytest.raises(DemotedError, match="read only"):
                await client.eval(Script("return redis.call('SET', KEYS[1], 'w')"), [b"k"], [])
            await until(lambda: client.connected)
            await client.call(b"SET", b"k", b"w")
            with successor.client() as look:
                assert look.get("k") == b"w"
            admin.replicaof("NO", "ONE")
        await client.close()
    successor.stop()


async def test_who_waits_for_a_connection_hears_when_the_client_is_closed() -> None:
    async with asyncio.timeout(10):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = RespClient(f"redis://127.0.0.1:{silent.getsockname()[1]}")
            waiting = asyncio.create_task(client.connect())
            await asyncio.sleep(0.01)
            await client.close()
            with pytest.raises(ConnectionError, match="closed"):
                await waiting


async def test_a_connection_that_never_lasts_is_not_made_again_without_a_pause() -> None:
    made = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        await reader.readuntil(b"server")
        writer.write(b"$11\r\nrun_id:abc\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with listening(hang_up) as url:
        client = RespClient(url)
        await client.connect()
        await asyncio.sleep(0.2)
        assert 1 < made <= 5
        await client.close()


async def test_a_client_that_starts_before_redis_says_so_and_connects_later(
    redis_server: RedisServer,
) -> None:
    redis_server.kill()
    client = RespClient(redis_server.url)
    with pytest.raises(ConnectionError, match="cannot connect"):
        await client.connect()
    redis_server.restart()
    await until(lambda: client.connected)
    assert await client.call(b"PING") == b"PONG"
    await client.close()
    with pytest.raises(ConnectionError):
        await client.call(b"PING")


async def test_a_password_is_asked_anew_at_each_connect_and_a_wrong_one_is_named(
    redis_server: RedisServer,
) -> None:
    with redis_server.client() as admin:
        admin.config_set("requirepass", "right")
        passwords = ["wrong", "right"]
        client = RespClient(redis_server.url, lambda: passwords.pop(0) if passwords else "right")
        try:
            with pytest.raises(ConnectionError, match="check the Redis password"):
                await client.connect()
            await until(lambda: client.connected)
            assert await client.call(b"PING") == b"PONG"
        finally:
            await client.close()
            admin.config_set("requirepass", "")


async def test_a_unix_socket_and_a_database_number_are_understood(tmp_path) -> None:
    server = start_redis(tmp_path, unix_socket=True)
    try:
        client = RespClient(f"{server.url}?db=3")
        await client.connect()
        await client.call(b"SET", b"k", b"v")
        assert b"db3:keys=1" in await client.call(b"INFO", b"keyspace")
        await client.close()
    finally:
        server.stop()


async def test_something_that_is_no_redis_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = RespClient(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ConnectionError, match="no Redis"):
        await client.connect()
    await client.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("url", ["http://host", "redis://host:port", "redis://host/x", "unix://"])
def test_a_bad_url_is_refused_with_the_forms_that_are_good(url: str) -> None:
    with pytest.raises(ValueError, match="write redis://"):
        Address.parse(url)


def test_an_address_shows_no_credentials() -> None:
    address = Address.parse("rediss://user:p%40ss@host:6380/2")
    assert address == Address("host", 6380, "", True, 2, "user", "p@ss")
    assert str(address) == "host:6380"


def test_deadlines_that_are_past_when_they_are_set_harm_no_other_call(redis_server: RedisServer) -> None:
    """On uvloop, which makes no timer of them."""

    async def call_in_a_hurry() -> None:
        client = RespClient(redis_server.url)
        await client.connect()
        results = await asyncio.gather(
            client.call(b"BLPOP", b"nothing", b"0.2", timeout_s=-1.0),
            client.call(b"ECHO", b"well"),
            return_exceptions=True,
        )
        await client.close()
        assert isinstance(results[0], DeadlineError)
        assert results[1] == b"well"

    uvloop.run(call_in_a_hurry())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_late_loop_reads_what_has_come_before_it_fails_a_call(
    redis_server: RedisServer, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def be_late() -> None:
        client = RespClient(redis_server.url)
        await client.connect()
        calls = [asyncio.ensure_future(client.call(b"ECHO", b"%d" % n, timeout_s=0.05)) for n in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - the loop is kept from its work on purpose
        results = await asyncio.gather(*calls, return_exceptions=True)
        await client.close()
        assert results == [b"0", b"1", b"2"]

    run(be_late())


async def test_what_is_posted_leaves_with_the_next_call_in_order_or_by_itself(
    redis_server: RedisServer,
) -> None:
    client, other = RespClient(redis_server.url), RespClient(redis_server.url)
    await client.connect()
    await other.connect()
    client.send_nowait(b"SET", b"posted", b"1")
    assert await client.call(b"GET", b"posted") == b"1"
    client.send_nowait(b"SET", b"posted", b"2")
    async with asyncio.timeout(2):
        while await other.call(b"GET", b"posted") != b"2":
            await asyncio.sleep(0.002)
    await client.close()
    await other.close()
