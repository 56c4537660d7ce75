"""What engines put into the store is in the index as the pool's, as long as the store's master has it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import pytest

from mooncake_core.blocks import block_keys
from mooncake_core.registry import Role
from mooncake_sidecar.engine.findable import LOOK_EVERY_S
from mooncake_testing.sidecars import SharedView, SidecarProcess
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import until

BLOCK = 16
STORE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
Start = Callable[[SimulatedProcess, str], SidecarProcess]


@pytest.fixture
def master(simulated: Simulated) -> SimulatedProcess:
    master = simulated.master()
    simulated.node(master)
    return master


@pytest.fixture
def start(start_sidecar: Callable[..., SidecarProcess], master: SimulatedProcess) -> Start:
    def begin(engine: SimulatedProcess, instance: str) -> SidecarProcess:
        return start_sidecar(
            engine, instance=instance, fetch="store", store="pool", store_url=master.bootstrap_url
        )

    return begin


def start_engine(simulated: Simulated, master: SimulatedProcess, **environ: str) -> SimulatedProcess:
    names = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"} | environ
    return simulated.engine(
        "--num-gpu-blocks-override",
        "200",
        events=True,
        connector=STORE,
        environ={**simulated.store_environ(master), **names},
    )


def compute(engine: SimulatedProcess, first_token: int) -> set[int]:
    """Have the engine compute a prompt of four blocks; returns their keys."""
    before = set(engine.get("/simulator/blocks")["keys"])
    prompt = [first_token + n for n in range(4 * BLOCK + 1)]
    answer = engine.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return set(engine.get("/simulator/blocks")["keys"]) - before


def in_pool(shared: SharedView, keys: set[int], *, all_of_them: bool) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        held = await shared.held(keys, "pool", tier=1)
        return held == keys if all_of_them else not held

    return check


async def test_blocks_of_all_engines_are_the_pools(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    one, two = start_engine(simulated, master), start_engine(simulated, master)
    start(one, "engine-0")
    start(two, "engine-1")
    keys = compute(one, 1000) | compute(two, 50_000)
    assert len(keys) == 8
    await until(in_pool(shared, keys, all_of_them=True))
    pool = await shared.instance("pool")
    assert pool is not None
    assert (pool.role, pool.url, pool.epoch, pool.block_size_tokens) == (
        Role.STORE,
        master.bootstrap_url,
        1,
        BLOCK,
    )
    engine = await shared.instance("engine-0")
    assert engine is not None
    assert (engine.fetch, engine.store) == ("store", "pool")
    # HBM is each engine's own.
    assert await shared.held(keys, "pool", tier=0) == set()


async def test_what_the_store_lost_leaves_the_index_and_the_engines_keep_theirs(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    engine = start_engine(simulated, master)
    start(engine, "engine-0")
    keys = compute(engine, 1000)
    await until(in_pool(shared, keys, all_of_them=True))
    async with httpx.AsyncClient(base_url=master.bootstrap_url, trust_env=False) as admin:
        assert (await admin.post("/api/v1/remove_all")).status_code == 200
    await until(in_pool(shared, keys, all_of_them=False))
    assert await shared.held(keys, "engine-0") == keys
    pool = await shared.instance("pool")
    assert pool is not None
    assert pool.epoch == 1


async def test_a_store_that_lost_everything_begins_a_new_epoch(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    engine = start_engine(simulated, master)
    start(engine, "engine-0")
    keys = set()
    for number in range(5):
        keys |= compute(engine, 1000 * (number + 1))
    await until(in_pool(shared, keys, all_of_them=True))
    async with httpx.AsyncClient(base_url=master.bootstrap_url, trust_env=False) as admin:
        assert (await admin.post("/api/v1/remove_all")).status_code == 200

    async def new_epoch() -> bool:
        pool = await shared.instance("pool")
        return pool is not None and pool.epoch == 2

    await until(new_epoch)
    await until(in_pool(shared, keys, all_of_them=False))
    again = compute(engine, 90_000)
    await until(in_pool(shared, again, all_of_them=True))


async def test_a_store_that_evicted_more_than_is_asked_about_at_once_has_not_lost_all(
    simulated: Simulated, start_sidecar: Callable[..., SidecarProcess], shared: SharedView
) -> None:
    master = simulated.master()
    simulated.node(master, size="40GB")
    engine = start_engine(simulated, master)
    start_sidecar(engine, instance="engine-0", fetch="store", store="pool", store_url=master.bootstrap_url)

    def fill(prompts: range) -> set[int]:
        keys = set()
        for number in prompts:
            prompt = [10_000 * number + n for n in range(180 * BLOCK + 1)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            assert engine.post("/v1/completions", body).status_code == 200
            keys |= set(block_keys(prompt, BLOCK))
        return keys

    async with httpx.AsyncClient(trust_env=False) as http:
        old = await asyncio.to_thread(fill, range(8))
        await until(in_pool(shared, old, all_of_them=True))
        names = (await http.get(f"{master.bootstrap_url}/get_all_keys")).text.split()
        assert len(names) == len(old) == 8 * 180
        new = await asyncio.to_thread(fill, range(8, 10))
        await until(in_pool(shared, new, all_of_them=True))
        # As the master does when it makes room: those longest unused, a share of all at once.
        evicted = msgspec.msgpack.encode({"keys": names})
        assert (await http.post(f"{master.url}/rpc/remove", content=evicted)).status_code == 200
    await until(in_pool(shared, old, all_of_them=False))
    assert await shared.held(new, "pool", tier=1) == new
    pool = await shared.instance("pool")
    assert pool is not None
    assert pool.epoch == 1


async def test_the_pool_outlives_an_engine_and_a_sidecar(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    one, two = start_engine(simulated, master), start_engine(simulated, master)
    first = start(one, "engine-0")
    start(two, "engine-1")
    keys = compute(one, 1000)
    await until(in_pool(shared, keys, all_of_them=True))
    one.kill()
    first.kill()
    await until(lambda: gone(shared, "engine-0"))
    assert await shared.held(keys, "pool", tier=1) == keys


async def test_what_the_store_evicts_of_an_engine_that_left_for_good_leaves_the_index(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    engines = [start_engine(simulated, master) for _ in range(3)]
    sidecars = [start(engine, f"engine-{n}") for n, engine in enumerate(engines)]
    keys = [compute(engine, 10_000 * (n + 1)) for n, engine in enumerate(engines)]
    await until(in_pool(shared, set().union(*keys), all_of_them=True))
    # One after the other: what the first left to the second goes on to the third.
    for engine, sidecar in zip(engines[:2], sidecars[:2], strict=True):
        engine.kill()
        sidecar.kill()
        left = sidecars[sidecars.index(sidecar) + 1 :]
        await until(lambda left=left: sum(each.status()["pool_blocks"] for each in left) == 12, within_s=30)
    assert await shared.held(set().union(*keys), "pool", tier=1) == set().union(*keys)
    async with httpx.AsyncClient(base_url=master.bootstrap_url, trust_env=False) as admin:
        assert (await admin.post("/api/v1/remove_all")).status_code == 200
    await until(in_pool(shared, set().union(*keys), all_of_them=False))
    pool = await shared.instance("pool")
    assert pool is not None
    assert pool.epoch == 1


async def test_a_sidecar_that_restarts_still_answers_for_what_it_took_over(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    one, two = start_engine(simulated, master), start_engine(simulated, master)
    first, second = start(one, "engine-0"), start(two, "engine-1")
    keys = compute(one, 1000)
    await until(in_pool(shared, keys, all_of_them=True))
    one.kill()
    first.kill()
    await until(lambda: second.status().get("pool_blocks") == len(keys), within_s=30)
    second.kill()
    second.start()
    await until(lambda: second.status().get("pool_blocks") == len(keys))
    async with httpx.AsyncClient(base_url=master.bootstrap_url, trust_env=False) as admin:
        assert (await admin.post("/api/v1/remove_all")).status_code == 200
    await until(in_pool(shared, keys, all_of_them=False))


async def gone(shared: SharedView, name: str) -> bool:
    return await shared.instance(name) is None


async def test_blocks_with_shortened_names_are_not_told_of_because_the_store_cannot_be_asked(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    engine = start_engine(simulated, master, VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="1")
    sidecar = start(engine, "engine-0")
    keys = compute(engine, 1000)

    async def counted() -> bool:
        async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False) as http:
            try:
                return "pool_blocks_nameless_total 4.0" in (await http.get("/metrics")).text
            except httpx.TransportError:
                return False

    await until(counted)
    assert await shared.held(keys, "pool", tier=1) == set()
    await until(lambda: holds(shared, keys))


async def holds(shared: SharedView, keys: set[int]) -> bool:
    return await shared.held(keys, "engine-0") == keys


async def metric(sidecar: SidecarProcess, name: str) -> float:
    async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False) as http:
        text = (await http.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def test_prompts_that_another_engine_has_put_into_the_pool_count_as_findable_and_new_ones_do_not(
    simulated: Simulated, master: SimulatedProcess, start: Start, shared: SharedView
) -> None:
    # Of another seed, so the store has them under names that the second engine never looks for.
    one = start_engine(simulated, master, PYTHONHASHSEED="1")
    other = start_engine(simulated, master, PYTHONHASHSEED="2")
    start(one, "engine-0")
    watched = start(other, "engine-1")
    await until(lambda: shared.instance("engine-1"))

    async def findable() -> float:
        return await metric(watched, "mooncake_sidecar_findable_prompts_total")

    async def settled(keys: set[int]) -> None:
        await until(in_pool(shared, keys, all_of_them=True))

    for number in range(4):
        await settled(compute(other, 500_000 + 1000 * number))
    assert await findable() == 0
    numbers = itertools.count(1)

    async def counted() -> bool:
        first_token = 1000 * next(numbers)
        await settled(compute(one, first_token))
        compute(other, first_token)
        # A sample is taken no more than once a second, and none where Redis does not answer at once.
        await asyncio.sleep(LOOK_EVERY_S)
        return await findable() > 0

    await until(counted, within_s=60)
    # So few tokens are no ground for an alarm.
    assert await metric(watched, "mooncake_sidecar_engine_never_hits") == 0
