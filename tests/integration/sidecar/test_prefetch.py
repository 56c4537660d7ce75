"""What schedulers want in DRAM a sidecar brings from SSD, through the store's client, and keeps there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from mooncake_core.blocks import block_keys
from mooncake_core.promotion import Cursor, Found, PromotionStreams, Wanted
from mooncake_core.resp import RespClient
from mooncake_testing.redis import RedisServer
from mooncake_testing.sidecars import NAMESPACE, SharedView, SidecarProcess
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import until

BLOCK = 16
PROMPT_BLOCKS = 20
MASTER = (
    "--promotion-on-hit", "true", "--promotion-max-per-heartbeat", "512", "--default-kv-lease-ttl", "100",
)  # fmt: skip
STORE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
DRAM, ANYWHERE = 1, 2
Start = Callable[..., SidecarProcess]


@pytest.fixture
def master(simulated: Simulated) -> SimulatedProcess:
    """A store whose DRAM holds six prompts, and whose SSD holds all."""
    master = simulated.master(*MASTER)
    simulated.node(master, "--ssd-size", "10GB", size="640MB")
    return master


@pytest.fixture
def engine(simulated: Simulated, master: SimulatedProcess) -> SimulatedProcess:
    return simulated.engine(
        "--num-gpu-blocks-override", "60", events=True, connector=STORE,
        environ={**simulated.store_environ(master), "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )  # fmt: skip


@pytest.fixture
def start(start_sidecar: Start, master: SimulatedProcess) -> Start:
    def begin(engine: SimulatedProcess, **settings: str) -> SidecarProcess:
        client = {
            "store_client": "mooncake_simulator.store.client",
            "store_address": f"127.0.0.1:{master.base}",
        }
        return start_sidecar(
            engine, instance="engine-0", fetch="store", store="pool", store_url=master.bootstrap_url,
            **client | settings,
        )  # fmt: skip

    return begin


@pytest.fixture
async def streams(redis_server: RedisServer) -> AsyncIterator[PromotionStreams]:
    client = RespClient(redis_server.url)
    await client.connect()
    yield PromotionStreams(client, NAMESPACE)
    await client.close()


def prompt(number: int) -> list[int]:
    return [10_000 * number + n for n in range(PROMPT_BLOCKS * BLOCK + 1)]


def keys_of(number: int) -> list[int]:
    return list(block_keys(prompt(number), BLOCK))


async def compute(engine: SimulatedProcess, *numbers: int) -> None:
    for number in numbers:
        body = {"model": "tiny", "prompt": prompt(number), "max_tokens": 1}
        answer = await asyncio.to_thread(engine.post, "/v1/completions", body)
        assert answer.status_code == 200, answer.text


async def in_dram(shared: SharedView, number: int) -> int:
    return len(await shared.held(keys_of(number), "pool", tier=DRAM))


async def until_on_ssd(shared: SharedView, number: int) -> None:
    async def left() -> bool:
        keys = keys_of(number)
        known = await shared.held(keys, "pool", tier=ANYWHERE)
        return len(known) == len(keys) and not await in_dram(shared, number)

    await until(left)


async def until_it_listens(sidecar: SidecarProcess, streams: PromotionStreams, number: int) -> None:
    """Until the sidecar carries wishes out: those of before its time it leaves alone."""

    async def carries_out() -> bool:
        await streams.want([Wanted(0, keys_of(number))])
        return sidecar.metric("mooncake_sidecar_pool_blocks_kept_total") > 0

    await until(carries_out)


async def findings(streams: PromotionStreams, number: int) -> list[Found]:
    return [found for found in await streams.read_findings(Cursor(), 100) if found.number == number]


async def test_blocks_on_ssd_that_are_wanted_come_to_dram_and_the_index_knows(
    engine: SimulatedProcess, start: Start, shared: SharedView, streams: PromotionStreams
) -> None:
    sidecar = start(engine)
    await compute(engine, *range(1, 9))
    await until_on_ssd(shared, 1)
    await until_it_listens(sidecar, streams, 8)
    await streams.want([Wanted(7, [*keys_of(1), *keys_of(8), 12345])])

    async def came() -> bool:
        told = await findings(streams, 7)
        return {key for found in told for key in found.brought} == set(keys_of(1))

    async def is_known() -> bool:
        return await in_dram(shared, 1) == PROMPT_BLOCKS

    await until(came)
    await until(is_known)
    told = await findings(streams, 7)
    assert {key for found in told for key in found.there} == set(keys_of(8))
    assert not any(found.gone for found in told)
    assert sidecar.metric("mooncake_sidecar_pool_blocks_promoted_total") == PROMPT_BLOCKS


async def test_wishes_of_two_that_led_one_after_the_other_are_both_answered(
    engine: SimulatedProcess, start: Start, shared: SharedView, streams: PromotionStreams
) -> None:
    start(engine)
    await compute(engine, *range(1, 10))
    for number in (1, 2):
        await until_on_ssd(shared, number)
    await streams.want([Wanted(7, keys_of(1)), Wanted(7, keys_of(2))])

    async def both_told() -> bool:
        brought = {key for found in await findings(streams, 7) for key in found.brought}
        return brought == {*keys_of(1), *keys_of(2)}

    await until(both_told, within_s=50)


async def test_what_is_looked_up_stays_and_what_is_not_makes_room(
    engine: SimulatedProcess, start: Start, shared: SharedView, streams: PromotionStreams
) -> None:
    start(engine)
    await compute(engine, 1, 2)

    async def both() -> bool:
        return await in_dram(shared, 1) + await in_dram(shared, 2) == 2 * PROMPT_BLOCKS

    await until(both)
    for number in range(3, 12):
        await streams.want([Wanted(0, keys_of(1))])
        # As long as a sidecar takes to see it.
        await asyncio.sleep(0.5)
        await compute(engine, number)
    await until_on_ssd(shared, 2)
    assert await in_dram(shared, 1) == PROMPT_BLOCKS


async def test_a_master_that_is_away_is_told_and_the_next_one_is_asked(
    simulated: Simulated,
    engine: SimulatedProcess,
    master: SimulatedProcess,
    start: Start,
    shared: SharedView,
    streams: PromotionStreams,
) -> None:
    sidecar = start(engine)
    await compute(engine, 1)

    async def is_there(number: int) -> bool:
        return await in_dram(shared, number) == PROMPT_BLOCKS

    await until(lambda: is_there(1))
    master.kill()

    async def away() -> bool:
        await streams.want([Wanted(0, keys_of(1)), Wanted(1, keys_of(1))])
        return sidecar.metric("mooncake_sidecar_store_client_away") == 1

    await until(away)
    anew = simulated.master(*MASTER, base=master.base)
    await until(lambda: httpx.get(f"{anew.bootstrap_url}/get_all_segments", trust_env=False).text)
    await compute(engine, *range(21, 29))
    await until_on_ssd(shared, 21)
    await streams.want([Wanted(2, keys_of(21))])
    await until(lambda: is_there(21))
    assert sidecar.metric("mooncake_sidecar_store_client_away") == 0


async def test_a_client_that_cannot_be_had_is_told_and_the_rest_goes_on(
    engine: SimulatedProcess, start: Start, shared: SharedView, streams: PromotionStreams
) -> None:
    sidecar = start(engine, store_client="mooncake_no_such_module")
    await compute(engine, *range(1, 9))
    await until_on_ssd(shared, 1)

    async def away() -> bool:
        await streams.want([Wanted(7, keys_of(1))])
        return sidecar.metric("mooncake_sidecar_store_client_away") == 1

    await until(away)
    assert "mooncake_no_such_module" in sidecar.log()
    await compute(engine, 20)

    async def known() -> bool:
        return await in_dram(shared, 20) == PROMPT_BLOCKS

    await until(known)


@pytest.mark.parametrize("method", ["", "    def batch_is_exist(self, keys): return []\n"])
async def test_a_client_unlike_mooncakes_is_told_and_the_engine_stays_registered(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: SimulatedProcess,
    start: Start,
    shared: SharedView,
    streams: PromotionStreams,
) -> None:
    (tmp_path / "odd_store_client.py").write_text(
        "class MooncakeDistributedStore:\n"
        "    def setup(self, *arguments): return 0\n"
        "    def batch_get_replica_desc(self, keys): return {}\n"
        f"    def close(self): return 0\n{method}"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sidecar = start(engine, store_client="odd_store_client")
    await compute(engine, 1)

    async def known(number: int) -> bool:
        return await in_dram(shared, number) == PROMPT_BLOCKS

    await until(lambda: known(1))

    async def away() -> bool:
        await streams.want([Wanted(0, keys_of(1))])
        return sidecar.metric("mooncake_sidecar_store_client_away") == 1

    await until(away)
    await compute(engine, 2)
    await until(lambda: known(2))
    assert sidecar.metric("mooncake_sidecar_registered") == 1


async def test_wishes_of_another_version_are_left_out_and_the_next_ones_done(
    redis_server: RedisServer,
    engine: SimulatedProcess,
    start: Start,
    shared: SharedView,
    streams: PromotionStreams,
) -> None:
    sidecar = start(engine)

    def told(error: str) -> bool:
        return any("left out" in line and error in line for line in sidecar.log().splitlines())

    await compute(engine, *range(1, 9))
    await until_on_ssd(shared, 1)
    await until_it_listens(sidecar, streams, 8)
    with redis_server.client() as client:
        for fields, error in (({"later": "1"}, "KeyError"), ({"n": "7", "k": b"123"}, "ValueError")):
            client.xadd(streams.wishes, fields)  # type: ignore[arg-type]
            await until(partial(told, error))
    await streams.want([Wanted(9, keys_of(1))])

    async def came() -> bool:
        return await in_dram(shared, 1) == PROMPT_BLOCKS

    await until(came)
