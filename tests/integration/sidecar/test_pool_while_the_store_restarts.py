"""What a sidecar keeps of the pool when blocks come, or Redis goes, while it asks the store's master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_core.index import RedisIndex, Tier
from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient
from mooncake_core.store_keys import store_key
from mooncake_sidecar.engine.mirror import Put, Shared
from mooncake_sidecar.engine.pool import Pool, pool_record
from mooncake_sidecar.engine.residency import Residency
from mooncake_testing.redis import RedisServer
from mooncake_testing.sidecars import NAMESPACE, SharedView
from mooncake_testing.waiting import until

MANY = range(1, 41)
MORE_THAN_A_ROUND = range(1, 601)
LATE = 999


class Master:
    """The admin port of a store's master that loses its memory, and can be interrupted while it answers."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.meanwhile: Callable[[], None] | None = None
        self.meanwhile_at = 1
        """Number of the answer during which it is interrupted."""
        self.answered = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            target = head.split()[1].decode()
            asked = target.partition("keys=")[2].replace("%2C", ",").replace("%3A", ":").replace("%40", "@")
            data = {name: self._found(name) for name in asked.split(",")}
            # What was asked for is settled: from now on it is the past.
            self.answered += 1
            if self.answered == self.meanwhile_at and self.meanwhile is not None:
                self.meanwhile()
            body = msgspec.json.encode({"data": data})
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    def _found(self, name: str) -> dict[str, Any]:
        there = name in self.names
        return {"ok": there, "values": [{}] if there else None}


class OneSidecar:
    """A pool's part of a sidecar, step by step."""

    def __init__(self, pool: Pool, residency: Residency, master: Master) -> None:
        self.pool = pool
        self.residency = residency
        self.master = master

    def put(self, numbers: Iterable[int]) -> None:
        """The engine puts blocks into the store and says so."""
        for number in numbers:
            name = number.to_bytes(32, "big")
            self.master.names.add(store_key("tiny", name))
            step = Put(int(Tier.DRAM), True, 0, 0, (name,), (number,))
            self.pool.tell(self.residency.mirror.carry_out(step).shared)

    async def written(self) -> None:
        await self.pool.beat()
        await self.pool.flush()

    async def checked(self, *, answers: int) -> None:
        """Check until the master has answered so often: blocks just told of are not asked about."""
        enough = self.master.answered + answers
        while self.master.answered < enough:
            await self.pool.check()
            await asyncio.sleep(0.02)

    def known(self) -> set[int]:
        return {block.key for block in self.residency.mirror.shared()}


@pytest.fixture
async def sidecar(tmp_path: Path, redis_server: RedisServer) -> AsyncIterator[OneSidecar]:
    master = Master()
    server = await asyncio.start_server(master.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engine = Instance(
        id="engine-0",
        role=Role.PREFILL,
        url="http://127.0.0.1:1",
        cluster="c",
        pool="prefill",
        model="tiny",
        engine=EngineKind.SIMULATED,
        block_size_tokens=16,
    )
    client = RespClient(redis_server.url)
    await client.connect()
    registry = RedisRegistry(redis_server.url, namespace=NAMESPACE)
    residency = Residency(tmp_path, "engine-0", has_pool=True)
    pool = Pool(
        pool_record("pool", url, engine),
        "tiny",
        registry=registry,
        index=RedisIndex(client, namespace=NAMESPACE),
        client=client,
        namespace=NAMESPACE,
        residency=residency,
        instance="engine-0",
    )
    yield OneSidecar(pool, residency, master)
    await pool.close()
    residency.close()
    await registry.close()
    await client.close()
    server.close()


async def test_a_block_put_while_the_loss_of_a_store_is_found_out_is_kept(
    sidecar: OneSidecar, shared: SharedView
) -> None:
    sidecar.put(MORE_THAN_A_ROUND)
    await sidecar.written()
    sidecar.master.names.clear()
    # 512 blocks of the round, 32 of the others to be sure, and the 88 that were never asked about.
    sidecar.master.meanwhile_at = 16 + 1 + 3
    sidecar.master.meanwhile = lambda: sidecar.put([LATE])
    await sidecar.checked(answers=20)
    await sidecar.written()
    pool = await shared.instance("pool")
    assert pool is not None
    assert pool.epoch == 2
    assert sidecar.known() == {LATE}
    assert await shared.held({LATE, *MORE_THAN_A_ROUND}, "pool", tier=1) == {LATE}
    # It is answered for: that it goes is noticed.
    sidecar.master.names.clear()
    await sidecar.checked(answers=1)
    await sidecar.written()
    assert await shared.held({LATE}, "pool", tier=1) == set()


async def test_a_block_put_again_while_the_master_says_that_it_is_gone_is_kept(
    sidecar: OneSidecar, shared: SharedView
) -> None:
    sidecar.put([LATE])
    await sidecar.written()
    sidecar.master.names.clear()
    sidecar.master.meanwhile = lambda: sidecar.put([LATE])
    await sidecar.checked(answers=1)
    await sidecar.written()
    assert sidecar.known() == {LATE}
    assert await shared.held({LATE}, "pool", tier=1) == {LATE}


async def test_a_block_that_has_two_names_is_known_by_the_other_one_when_one_is_gone(
    sidecar: OneSidecar,
) -> None:
    sidecar.put([LATE])
    await sidecar.written()
    hashed_otherwise = Shared(bytes(32), LATE, Tier.DRAM)
    sidecar.pool.tell([hashed_otherwise])
    sidecar.master.names = {store_key("tiny", hashed_otherwise.hash)}
    await sidecar.checked(answers=1)
    assert sidecar.pool.known([LATE]) == {hashed_otherwise.hash: LATE}


async def test_a_loss_found_out_while_redis_does_not_answer_is_found_out_again(
    sidecar: OneSidecar, shared: SharedView, redis_server: RedisServer
) -> None:
    sidecar.put(MANY)
    await sidecar.written()
    assert await shared.held(MANY, "pool", tier=1) == set(MANY)
    sidecar.master.names.clear()
    sidecar.master.meanwhile = redis_server.pause
    with pytest.raises(ConnectionError):
        await sidecar.checked(answers=1)
    redis_server.resume()

    async def forgotten() -> bool:
        try:
            await sidecar.written()
            await sidecar.pool.check()
        except ConnectionError:
            return False
        return not await shared.held(MANY, "pool", tier=1)

    await until(forgotten)
    assert sidecar.known() == set()
    pool = await shared.instance("pool")
    assert pool is not None
    assert pool.epoch == 2
