"""Entry 10: unique prompts for ever, and memory that does not grow with them."""

from __future__ import annotations

import asyncio
import itertools
import sys
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import msgspec

from mooncake_core.index import MemoryIndex, PrefixIndex, RedisIndex, Removed, Source, Stored, Tier
from mooncake_core.resp import RespClient
from mooncake_scheduler.gateway import residency
from mooncake_scheduler.gateway.residency import LocalResidency, SharedResidency
from mooncake_testing.raw_client import RawClient, request_bytes
from mooncake_testing.redis import RedisServer
from mooncake_testing.scheduler_process import SchedulerProcess
from mooncake_testing.scripted_engine import ScriptedEngine, engines

MILLION = 1_000_000
BATCH = 20_000
HELD = 100_000


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def soak(
    index: PrefixIndex,
    used_bytes: Callable[[], int],
    housekeep: Callable[[], Awaitable[object]],
    *,
    evicts: bool,
    prefixes: int,
) -> list[int]:
    """Store unique prefixes; memory after each tenth.

    Args:
        index: which takes them.
        used_bytes: memory now.
        housekeep: what runs in the background.
        evicts: the holder forgets as engines do, beyond what it can hold.
        prefixes: how many.
    """
    chance = Random(1)
    source = Source("b0", 1)
    await index.attach(source)
    held: list[array[int]] = []
    seen = []
    for number in range(prefixes // BATCH):
        keys = array("Q", chance.randbytes(8 * BATCH))
        changes: list[Stored | Removed] = [Stored(keys, Tier.HBM)]
        if evicts:
            held.append(keys)
            if len(held) * BATCH > HELD:
                changes.append(Removed(held.pop(0), Tier.HBM))
        await index.apply(source, changes, number + 1)
        await housekeep()
        if (number + 1) % (prefixes // BATCH // 10) == 0:
            seen.append(used_bytes())
    return seen


async def test_a_million_unique_prefixes_leave_the_index_in_memory_within_its_budget() -> None:
    index = MemoryIndex(HELD)
    seen = await soak(index, rss_bytes, lambda: index.sweep(8), evicts=False, prefixes=MILLION)
    assert len(index) <= HELD
    # 16 bytes a block: to keep the seven tenths between would take 11 MB.
    assert seen[-1] - seen[2] < 6_000_000, seen


async def test_unique_prefixes_that_engines_evict_leave_redis_as_it_was(
    redis_server: RedisServer,
) -> None:
    client = RespClient(redis_server.url)
    await client.connect()
    look = redis_server.client()
    try:
        index = RedisIndex(client, namespace="soak", write_timeout_s=10)

        def used() -> int:
            found: int = look.info("memory")["used_memory_dataset"]
            return found

        seen = await soak(index, used, lambda: index.sweep(8), evicts=True, prefixes=2 * MILLION // 5)
        assert seen[-1] - seen[2] < 3_000_000, seen
        assert await index.blocks() <= HELD + BATCH
    finally:
        look.close()
        await client.close()


async def test_what_is_kept_for_the_time_without_redis_is_bounded_in_bytes() -> None:
    shared = SharedResidency(MemoryIndex(), LocalResidency())
    for number in range(2_000):
        # 131 072 tokens in blocks of 16.
        await shared.holds("b0", array("Q", range(number, number + 8_192)), Tier.HBM)
    kept = sum(sys.getsizeof(keys) for _, keys, _ in shared._journal)
    assert kept <= 8 * residency.JOURNAL_KEYS * 1.1
    assert len(shared._journal) > 100, "and it is still worth something"


async def test_a_gateway_that_meets_only_new_prompts_does_not_grow(tmp_path: Path) -> None:
    engine = ScriptedEngine("b0")
    file = tmp_path / "instances.json"
    numbers = itertools.count(0)
    async with engines(engine):
        file.write_bytes(
            msgspec.json.encode([engine.instance(block_size_tokens=4, kv_capacity_tokens=4 * 2_000)])
        )
        process = SchedulerProcess(tmp_path, instances_file=str(file))

        async def ask(count: int) -> int:
            async def one_client() -> None:
                client = await RawClient.connect(process.serving_port)
                try:
                    for _ in range(count // 4):
                        # 128 blocks that nobody has seen before.
                        prompt = [next(numbers), *range(511)]
                        client.writer.write(request_bytes({"prompt": prompt, "max_tokens": 2}))
                        assert (await client.answer())[0] == 200, process.log()[-2_000:]
                finally:
                    client.leave()

            await asyncio.gather(*(one_client() for _ in range(4)))
            engine.seen.clear()
            return process.rss_bytes()

        try:
            await process.ready()
            # The last 2 048 decisions are kept for `explain`.
            before = await ask(2_100)
            after = await ask(1_000)
            # 128 000 new blocks: in a dictionary that nobody empties about 13 MB.
            assert after - before < 4_000_000, (before, after)
        finally:
            process.end()
