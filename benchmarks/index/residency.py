"""What the two indexes take and how quick they are."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

from mooncake_core.index import MemoryIndex, RedisIndex, Removed, Source, Stored, Tier
from mooncake_core.resp import RespClient

BATCH = 256
ROUNDS, CALLS = 5, 60
PROMPT_BLOCKS = 8192

Index = MemoryIndex | RedisIndex
Bytes = Callable[[], Awaitable[int]]


@dataclass
class Figures:
    bytes_per_block: float
    bytes_per_extra_holder: float
    bytes_per_extra_holder_of_64: float
    inserts_per_s: float
    match_8192_at_4_ms: float
    match_8192_at_64_ms: float
    match_256_at_4_ms: float
    match_256_at_64_ms: float
    growth: float
    """Bytes after all unique prefixes over bytes after a fifth of them, the engine's cache being full."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def random_keys(count: int, seed: int) -> array[int]:
    chance = Random(seed)
    return array("Q", (chance.getrandbits(64) for _ in range(count)))


async def store(index: Index, source: Source, keys: Sequence[int], first_sequence: int = 0) -> None:
    for at in range(0, len(keys), BATCH):
        await index.apply(source, [Stored(keys[at : at + BATCH], Tier.HBM)], first_sequence + at)


async def match_ms(index: Index, keys: Sequence[int]) -> float:
    """Median of a round, the best of several rounds: what other processes do only ever adds."""
    medians = []
    for _ in range(ROUNDS):
        took = []
        for _ in range(CALLS):
            start = time.perf_counter()
            await index.match(keys)
            took.append(time.perf_counter() - start)
        medians.append(median(took))
    return min(medians) * 1e3


async def growth(index: Index, source: Source, used: Bytes, prefixes: int) -> float:
    """An engine that holds a tenth of the prefixes sees them all once, freeing the oldest."""
    keys = random_keys(prefixes, seed=5)
    capacity = prefixes // 10
    early = 0
    for sequence, at in enumerate(range(0, prefixes, BATCH)):
        fresh = keys[at : at + BATCH]
        freed = keys[max(at - capacity, 0) : max(at + BATCH - capacity, 0)]
        await index.apply(source, [Removed(freed, Tier.HBM), Stored(fresh, Tier.HBM)], sequence)
        if not early and at >= prefixes // 5:
            early = await used()
    return await used() / early


async def measure(index: Index, other: Index, used: Bytes, blocks: int) -> Figures:
    sources = [Source(f"pool-p-{number}", 1) for number in range(64)]
    for source in sources:
        await index.attach(source)
    keys = random_keys(blocks, seed=1)

    before = await used()
    start = time.perf_counter()
    await store(index, sources[0], keys)
    inserts_per_s = blocks / (time.perf_counter() - start)
    with_one = await used()
    shared = keys[: blocks // 4]
    for source in sources[1:4]:
        await store(index, source, shared)
    with_four = await used()
    few = keys[: blocks // 64]
    for source in sources[4:]:
        await store(index, source, few, blocks)
    with_64 = await used()

    # Prompts of their own, each holder ending elsewhere: the most looks that a match can need.
    prompt = random_keys(PROMPT_BLOCKS, seed=2)
    for number, source in enumerate(sources[:4]):
        await store(index, source, prompt[: PROMPT_BLOCKS - 1500 * number], 10 * blocks)
    deep = random_keys(PROMPT_BLOCKS, seed=3)
    for number, source in enumerate(sources):
        await store(index, source, deep[: PROMPT_BLOCKS - 125 * number], 20 * blocks)
    short, short_64 = random_keys(256, seed=4), random_keys(256, seed=6)
    for number, source in enumerate(sources):
        if number < 4:
            await store(index, source, short[: 256 - 50 * number], 30 * blocks)
        await store(index, source, short_64[: 256 - 3 * number], 40 * blocks)

    figures = Figures(
        bytes_per_block=(with_one - before) / blocks,
        bytes_per_extra_holder=max(with_four - with_one, 0) / (3 * len(shared)),
        bytes_per_extra_holder_of_64=max(with_64 - with_four, 0) / (60 * len(few)),
        inserts_per_s=inserts_per_s,
        match_8192_at_4_ms=await match_ms(index, prompt),
        match_8192_at_64_ms=await match_ms(index, deep),
        match_256_at_4_ms=await match_ms(index, short),
        match_256_at_64_ms=await match_ms(index, short_64),
        growth=0.0,
    )
    await other.attach(sources[0])
    figures.growth = await growth(other, sources[0], used, blocks)
    return figures


async def measure_memory(blocks: int) -> Figures:
    async def used() -> int:
        return resident_bytes()

    return await measure(MemoryIndex(), MemoryIndex(blocks // 10), used, blocks)


async def measure_redis(url: str, blocks: int) -> Figures:
    client = RespClient(url)
    await client.connect()
    # As the operator's own Redis is set: 64 holders of a block then fit into its compact form.
    await client.call("CONFIG", "SET", "hash-max-ziplist-value", 1024)

    async def used() -> int:
        info = await client.call("INFO", "memory")
        return int(info.partition(b"used_memory:")[2].split(None, 1)[0])

    index = RedisIndex(client, namespace="bench/model/16", timeout_s=10, write_timeout_s=10)
    other = RedisIndex(client, namespace="bench-growth/model/16", timeout_s=10, write_timeout_s=10)
    try:
        return await measure(index, other, used, blocks)
    finally:
        await client.close()


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(measure_memory(int(sys.argv[1]))))))
