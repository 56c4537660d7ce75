import asyncio
from array import array
from collections.abc import Iterator
from random import Random

import pytest
from redis.exceptions import ResponseError

from mooncake_core.index import Depth, RedisIndex, Removed, SlotsExhaustedError, Source, Stored, Tier
from mooncake_core.registry import StaleEpochError
from mooncake_core.resp import DeadlineError, RespClient, UnavailableError
from mooncake_testing.redis import RedisServer
from mooncake_testing.waiting import until

ROOT = "mc:{t}:index"
A, B = Source("a", 1), Source("b", 1)


def random_keys(count: int, seed: int = 1) -> array:
    chance = Random(seed)
    return array("Q", (chance.getrandbits(64) for _ in range(count)))


@pytest.fixture
async def index(client: RespClient) -> RedisIndex:
    return RedisIndex(client, namespace="t", timeout_s=5, write_timeout_s=5)


@pytest.fixture
def setting(redis_server: RedisServer) -> Iterator:
    """Change a setting of the server for one test."""
    with redis_server.client() as admin:
        before: dict[str, str] = {}

        def change(name: str, value: object) -> None:
            before.setdefault(name, admin.config_get(name)[name])
            admin.config_set(name, value)

        yield change
        if redis_server.alive:
            for name, value in before.items():
                admin.config_set(name, value)


async def encodings(client: RespClient) -> set[bytes]:
    names = [name for name in await client.call("KEYS", f"{ROOT}:*") if name.split(b":")[-1].isdigit()]
    return set(await client.call_many([("OBJECT", "ENCODING", name) for name in names]))


async def test_the_memory_that_the_index_takes_is_estimated_from_a_few_buckets(
    index: RedisIndex, client: RespClient, redis_server: RedisServer
) -> None:
    empty = await index.memory_bytes()
    assert empty is not None
    await index.attach(A)
    for part in range(10):
        await index.apply(A, [Stored(random_keys(4_000, seed=part), Tier.HBM)], part)
    exact = 0
    for name in await client.call("KEYS", f"{ROOT}*"):
        exact += await client.call("MEMORY", "USAGE", name)
    assert await index.memory_bytes(sample=100_000) == exact
    estimated = await index.memory_bytes()
    assert estimated == pytest.approx(exact, rel=0.25)
    assert estimated > empty


async def test_where_redis_does_not_tell_its_memory_nothing_is_said(
    index: RedisIndex, redis_server: RedisServer
) -> None:
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "default", "-memory")
        try:
            assert await index.memory_bytes() is None
        finally:
            admin.execute_command("ACL", "SETUSER", "default", "+memory")


async def test_what_one_client_writes_another_matches(index: RedisIndex, redis_server: RedisServer) -> None:
    keys = random_keys(100)
    await index.attach(A)
    await index.apply(A, [Stored(keys, Tier.HBM), Stored(keys[:50], Tier.SSD)], 0)
    other_client = RespClient(redis_server.url)
    await other_client.connect()
    other = RedisIndex(other_client, namespace="t", timeout_s=5)
    assert await other.match(list(keys)) == {"a": Depth(100, 100, 100)}
    assert await other.match_many([[], keys[:10], random_keys(5, seed=2)]) == [
        {},
        {"a": Depth(10, 10, 10)},
        {},
    ]
    await other_client.close()


async def test_namespaces_do_not_mix_and_braces_are_refused(index: RedisIndex, client: RespClient) -> None:
    keys = random_keys(10)
    await index.attach(A)
    await index.apply(A, [Stored(keys, Tier.HBM)], 0)
    other = RedisIndex(client, namespace="cluster/model/512", timeout_s=5)
    assert await other.match(keys) == {}
    assert await index.match(keys) == {"a": Depth(10, 10, 10)}
    with pytest.raises(ValueError, match="braces"):
        RedisIndex(client, namespace="a}b")


async def test_a_killed_redis_fails_quickly_and_its_empty_successor_is_filled_by_a_resync(
    index: RedisIndex, client: RespClient, redis_server: RedisServer
) -> None:
    keys = random_keys(3000)
    await index.attach(A)
    writing = asyncio.create_task(index.apply(A, [Stored(keys, Tier.HBM)], 0))
    await asyncio.sleep(0.002)
    redis_server.kill()
    with pytest.raises(ConnectionError):
        await writing
    with pytest.raises(ConnectionError):
        await index.match(keys)
    redis_server.restart()
    await until(lambda: client.connected)
    assert await index.match(keys) == {}
    with pytest.raises(StaleEpochError):
        await index.apply(A, [Stored(keys[:10], Tier.HBM)], 1)
    await index.attach(A)
    await index.apply(A, [Stored(keys, Tier.HBM)], 0)
    assert await index.match(keys) == {"a": Depth(3000, 3000, 3000)}


async def test_a_slow_redis_costs_a_match_no_more_than_its_budget(
    client: RespClient, index: RedisIndex, redis_server: RedisServer
) -> None:
    await index.attach(A)
    quick = RedisIndex(client, namespace="t", timeout_s=0.005)
    redis_server.pause()
    with pytest.raises(DeadlineError):
        await asyncio.wait_for(quick.match([1, 2, 3]), 5)
    redis_server.resume()
    assert await index.match([1, 2, 3]) == {}


async def test_flushed_scripts_are_loaded_again(index: RedisIndex, client: RespClient) -> None:
    await index.attach(A)
    for sequence in range(3):
        await client.call("SCRIPT", "FLUSH")
        assert await index.apply(A, [Stored([sequence], Tier.HBM)], sequence) == sequence
        await client.call("SCRIPT", "FLUSH")
        assert await index.match([sequence]) == {"a": Depth(1, 1, 1)}


async def test_a_full_redis_is_a_connection_error_and_nothing_is_half_counted(
    index: RedisIndex, setting
) -> None:
    keys = random_keys(1000)
    await index.attach(A)
    await index.apply(A, [Stored(keys[:500], Tier.HBM)], 0)
    setting("maxmemory", "1mb")
    keys.extend(random_keys(100_000, seed=2))
    with pytest.raises(UnavailableError):
        await index.apply(A, [Stored(keys, Tier.HBM)], 1)
    setting("maxmemory", "0")
    await index.apply(A, [Stored(keys, Tier.HBM)], 1)
    assert await index.blocks() == len(keys)
    assert (await index.match(keys))["a"].hbm == len(keys)


async def test_an_engine_that_clears_its_cache_is_forgotten_at_once_and_its_slot_serves_again(
    index: RedisIndex, client: RespClient
) -> None:
    keys = random_keys(2000)
    await index.attach(B)
    await index.apply(B, [Stored(keys[:100], Tier.DRAM)], 0)
    for epoch in range(1, 30):
        source = Source("a", epoch)
        await index.attach(source)
        assert (await index.match(keys)) == {"b": Depth(0, 100, 100)}
        await index.apply(source, [Stored(keys, Tier.HBM)], 0)
        assert (await index.match(keys))["a"] == Depth(2000, 2000, 2000)
        while await index.sweep(64):
            pass
    assert int(await client.call("HGET", ROOT, "slots")) <= 3
    assert await encodings(client) == {b"ziplist"} or await encodings(client) == {b"listpack"}
    await index.detach(Source("a", 29))
    while await index.sweep(64):
        pass
    assert await index.blocks() == 100
    await index.detach(B)
    while await index.sweep(1000):
        pass
    assert await index.blocks() == 0
    assert not await encodings(client), "buckets were left behind"


async def test_a_sweep_under_way_misses_no_block_that_a_split_moves(index: RedisIndex, setting) -> None:
    setting("hash-max-ziplist-entries", 8)
    old, new = random_keys(1500), random_keys(4000, seed=2)
    await index.attach(A)
    await index.apply(A, [Stored(old, Tier.HBM)], 0)
    await index.detach(A)
    await index.attach(B)
    assert await index.sweep(100) == 1
    for sequence, start in enumerate(range(0, 4000, 250)):
        await index.apply(B, [Stored(new[start : start + 250], Tier.HBM)], sequence)
        await index.sweep(20)
    while await index.sweep(500):
        pass
    assert await index.blocks() == len(new)
    await index.attach(Source("c", 1))  # takes the slot that A had
    assert await index.match(old) == {}


async def test_slots_that_run_out_are_a_clear_error_until_the_sweep(
    index: RedisIndex, client: RespClient
) -> None:
    await index.attach(A)
    await client.call("HSET", ROOT, "slots", 8191)
    with pytest.raises(SlotsExhaustedError, match="sweep"):
        await index.attach(B)
    await index.detach(A)
    while await index.sweep(1000):
        pass
    await index.attach(B)
    await index.apply(B, [Stored([1], Tier.HBM)], 0)
    assert await index.match([1]) == {"b": Depth(1, 1, 1)}


async def test_more_ended_lives_than_lua_unpacks_at_once_are_swept_in_one_go(
    index: RedisIndex, client: RespClient
) -> None:
    await index.attach(A)
    await index.apply(A, [Stored([1, 2], Tier.HBM)], 0)
    await index.detach(A)
    await client.call_many([("SADD", f"{ROOT}:stale", *range(1, 8191)), ("HSET", ROOT, "slots", 8191)])
    while await index.sweep(1000):
        pass
    assert await client.call("LLEN", f"{ROOT}:free") == 8191
    assert await index.blocks() == 0
    await index.attach(B)


@pytest.mark.parametrize("shortage", ["cannot save", "short of replicas"])
async def test_a_redis_that_refuses_writes_is_away_and_used_again_when_it_takes_them(
    index: RedisIndex, redis_server: RedisServer, setting, shortage: str
) -> None:
    with redis_server.client() as admin:
        if shortage == "cannot save":
            (redis_server.directory / "no-file").mkdir(exist_ok=True)
            setting("dbfilename", "no-file")
            setting("save", "3600 1000000")
            admin.set("x", 1)
            admin.bgsave()
            await until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        else:
            setting("min-replicas-to-write", 1)
        with pytest.raises(UnavailableError):
            await index.attach(A)
        setting("save", "")
        setting("min-replicas-to-write", 0)
    await index.attach(A)


async def test_the_highest_slot_is_not_taken_for_an_overflow(index: RedisIndex, client: RespClient) -> None:
    await index.attach(A)
    await client.call("HSET", ROOT, "slots", 8190)
    await index.attach(B)
    for source in (B, A):
        await index.apply(
            source, [Stored([1, 2], Tier.HBM), Stored([1], Tier.DRAM), Stored([1], Tier.SSD)], 0
        )
    assert await index.match([1, 2]) == {"a": Depth(2, 2, 2), "b": Depth(2, 2, 2)}
    assert index.stats.overflows == 0


@pytest.mark.parametrize(("value_bytes", "listed"), [(64, 31), (1024, 64)])
async def test_a_block_that_64_hold_stays_compact_and_says_when_not_all_are_listed(
    index: RedisIndex, client: RespClient, setting, value_bytes: int, listed: int
) -> None:
    setting("hash-max-ziplist-value", value_bytes)
    keys = random_keys(300)
    sources = [Source(f"pool-{n}", 1) for n in range(64)]
    for source in sources:
        await index.attach(source)
        await index.apply(source, [Stored(keys, Tier.HBM)], 0)
    matched = await index.match(keys)
    assert len(matched) == listed
    assert set(matched.values()) == {Depth(300, 300, 300)}
    assert bool(index.stats.overflows) == (listed < 64)
    assert not await encodings(client) & {b"hashtable"}
    # As soon as a listed holder frees a block, there is room for others that report it.
    for source in sources[:40]:
        await index.apply(source, [Removed(keys, Tier.HBM)], 1)
    for source in sources[40:]:
        await index.apply(source, [Stored(keys, Tier.HBM)], 1)
    assert len(await index.match(keys)) == 24 or value_bytes == 64
    for source in sources:
        await index.apply(source, [Removed(keys, Tier.HBM)], 2)
    assert await index.blocks() == 0


async def test_of_64_holders_at_different_depths_the_deepest_8_are_exact_and_none_is_promised_too_much(
    index: RedisIndex, setting
) -> None:
    setting("hash-max-ziplist-value", 1024)
    keys = random_keys(4096)
    true = {f"pool-{n}": 4000 - 61 * n for n in range(64)}
    for name, depth in true.items():
        await index.attach(Source(name, 1))
        await index.apply(Source(name, 1), [Stored(keys[:depth], Tier.HBM)], 0)
    matched = await index.match(keys)
    assert matched.keys() == true.keys()
    for rank, (name, depth) in enumerate(true.items()):
        assert matched[name].hbm == depth if rank < 8 else 0 < matched[name].hbm <= depth
    assert index.stats.looks <= 512
    assert index.stats.holes == 0
    full = RedisIndex(index._client, namespace="t", timeout_s=5, deepest=64)
    assert {name: depth.hbm for name, depth in (await full.match(keys)).items()} == true


async def test_a_large_hole_is_found_and_counted(index: RedisIndex) -> None:
    keys = random_keys(2000)
    await index.attach(A)
    await index.apply(A, [Stored(keys, Tier.DRAM), Removed(keys[100:990], Tier.DRAM)], 0)
    # The places looked at differ from match to match: one alone may miss it.
    depths = {(await index.match(keys))["a"].dram for _ in range(10)}
    assert min(depths) == 100
    assert depths <= {100, 2000}
    assert 1 <= index.stats.holes <= 10


async def test_buckets_split_online_while_others_write_and_match(
    index: RedisIndex, client: RespClient, setting, redis_server: RedisServer
) -> None:
    # One block a bucket: the splits pass the 65 536th bucket, where keys are stored one byte shorter.
    setting("hash-max-ziplist-entries", 4)
    keys = random_keys(68_000)
    halves = {A: keys[:34_000], B: keys[34_000:]}
    shared = random_keys(500, seed=3)
    for source in halves:
        await index.attach(source)
        await index.apply(source, [Stored(shared, Tier.HBM)], 0)

    async def write(source: Source) -> None:
        for sequence, start in enumerate(range(0, 34_000, 1000), start=1):
            await index.apply(source, [Stored(halves[source][start : start + 1000], Tier.HBM)], sequence)

    async def ask(writers: list[asyncio.Task]) -> int:
        asked = 0
        while not all(writer.done() for writer in writers):
            assert await index.match(shared) == {"a": Depth(500, 500, 500), "b": Depth(500, 500, 500)}
            asked += 1
        return asked

    writers = [asyncio.create_task(write(source)) for source in halves]
    asked = await ask(writers)
    await asyncio.gather(*writers)
    assert asked > 10
    assert await index.blocks() == 68_500
    assert int(await client.call("HGET", ROOT, "buckets")) > 65_536
    requests = [halves[source][start : start + 30] for source in halves for start in range(0, 34_000, 30)]
    for start in range(0, len(requests), 200):
        for keys_asked, matched in zip(
            requests[start : start + 200], await index.match_many(requests[start : start + 200]), strict=True
        ):
            assert [depth.hbm for depth in matched.values()] == [len(keys_asked)]
    for source, own in halves.items():
        await index.apply(source, [Removed(own, Tier.HBM), Removed(shared, Tier.HBM)], 1000)
    assert await index.blocks() == 0


async def test_a_batch_cut_into_many_calls_is_fenced_as_a_whole(
    index: RedisIndex, client: RespClient
) -> None:
    keys = random_keys(20_000)
    await index.attach(A)
    writing = asyncio.create_task(index.apply(A, [Stored(keys, Tier.HBM)], 7))
    while not await index.blocks():
        await asyncio.sleep(0)
    assert not writing.done()
    await index.attach(Source("a", 2))
    with pytest.raises(StaleEpochError):
        await writing
    assert await index.match(keys) == {}
    assert await index.apply(Source("a", 2), [], 0) == 0, "the old life's sequence was taken over"


async def test_a_batch_that_broke_off_is_carried_out_whole_when_it_is_repeated(
    index: RedisIndex, client: RespClient
) -> None:
    keys = random_keys(20_000)
    await index.attach(A)
    writing = asyncio.create_task(index.apply(A, [Stored(keys, Tier.HBM), Removed(keys[5:], Tier.HBM)], 7))
    while not await index.blocks():
        await asyncio.sleep(0)
    await client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
    with pytest.raises(ConnectionError):
        await writing
    await until(lambda: client.connected)
    assert await index.apply(A, [Stored(keys, Tier.HBM), Removed(keys[5:], Tier.HBM)], 7) == 7
    assert await index.match(keys) == {"a": Depth(5, 5, 5)}
    assert await index.blocks() == 5


async def test_a_redis_that_denies_config_is_taken_at_its_defaults(
    index: RedisIndex, client: RespClient, redis_server: RedisServer
) -> None:
    await client.call("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-config")
    limited = RespClient(redis_server.url.replace("redis://", "redis://limited:secret@"))
    await limited.connect()
    other = RedisIndex(limited, namespace="t", timeout_s=5)
    await other.attach(A)
    await other.apply(A, [Stored([1], Tier.HBM)], 0)
    assert await other.match([1]) == {"a": Depth(1, 1, 1)}
    await limited.close()
    await client.call("ACL", "DELUSER", "limited")


async def test_a_redis_that_is_busy_when_it_is_asked_for_its_settings_is_asked_again(
    index: RedisIndex, redis_server: RedisServer, setting
) -> None:
    setting("hash-max-ziplist-value", 1024)
    setting("lua-time-limit", 1)
    await index.attach(A)
    with redis_server.client() as busy, redis_server.client() as admin:
        running = asyncio.create_task(
            asyncio.to_thread(busy.eval, "while true do end", 0), name="a script that does not end"
        )

        def is_busy() -> bool:
            try:
                return not admin.ping()
            except ResponseError:
                return True

        await until(is_busy)
        with pytest.raises(UnavailableError, match="BUSY"):
            await index.apply(A, [Stored([1], Tier.HBM)], 0)
        admin.execute_command("SCRIPT", "KILL")
        await asyncio.gather(running, return_exceptions=True)
    for number in range(40):
        source = Source(f"i{number}", 1)
        await index.attach(source)
        await index.apply(source, [Stored([1], Tier.HBM)], 0)
    assert len(await index.match([1])) == 40
    assert index.stats.overflows == 0
