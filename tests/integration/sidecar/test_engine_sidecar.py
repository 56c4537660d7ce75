"""A sidecar beside a simulated engine, on a real Redis: each part dies, and the index becomes true again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from mooncake_core.ledger import Limits, RedisLedger, Reservation, ledger_prefix
from mooncake_core.registry import InstanceState, Role
from mooncake_core.resp import RespClient
from mooncake_sidecar.engine.__main__ import FORGOTTEN_AFTER_S
from mooncake_testing.redis import RedisServer, start_redis
from mooncake_testing.service import Service
from mooncake_testing.sidecars import NAMESPACE, SharedView, SidecarProcess
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import until

Start = Callable[..., SidecarProcess]
BLOCK = 16
AS_BYTES = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}


@pytest.fixture
def engine(simulated: Simulated) -> SimulatedProcess:
    return simulated.engine("--num-gpu-blocks-override", "200", events=True, environ=AS_BYTES)


def compute(engine: SimulatedProcess, first_token: int, blocks: int = 4) -> None:
    """Have the engine compute a prompt whose blocks it then holds."""
    prompt = [first_token + n for n in range(blocks * BLOCK + 1)]
    answer = engine.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def keys(engine: SimulatedProcess) -> list[int]:
    """What the engine holds, by its own account."""
    held: list[int] = engine.get("/simulator/blocks")["keys"]
    return held


async def agrees(shared: SharedView, engine: SimulatedProcess, *, without: list[int] | None = None) -> None:
    """Wait until the index holds exactly what the engine holds."""
    never = set(without or []) - set(keys(engine))

    async def equal() -> bool:
        instance = await shared.instance("engine-0")
        there = set(keys(engine))
        return (
            instance is not None
            and await shared.held(there, "engine-0") == there
            and not await shared.held(never, "engine-0")
        )

    await until(equal)


async def ready(http: httpx.AsyncClient) -> None:
    """Wait until the sidecar says so: a moment later than others see what it has written."""

    async def answers() -> bool:
        return (await http.get("/readyz")).status_code == 200

    await until(answers)


async def registered(shared: SharedView, *, after: int = 0) -> int:
    """Wait until the engine is registered under an epoch above one; returns it."""

    async def there() -> bool:
        instance = await shared.instance("engine-0")
        return instance is not None and instance.epoch > after

    await until(there)
    instance = await shared.instance("engine-0")
    assert instance is not None
    return instance.epoch


async def test_an_engine_without_metrics_is_registered_and_indexed_and_no_load_is_reported(
    simulated: Simulated, start_sidecar: Start, shared: SharedView
) -> None:
    mute = simulated.engine("--disable-log-stats", events=True, environ=AS_BYTES)
    assert "vllm:" not in mute.http.get(f"{mute.url}/metrics").text
    sidecar = start_sidecar(mute, block_size_tokens=BLOCK, drain_timeout_s=10)
    compute(mute, 1000)
    await agrees(shared, mute)
    instance = await shared.instance("engine-0")
    assert instance is not None
    assert (instance.block_size_tokens, instance.kv_capacity_tokens) == (BLOCK, 0)
    # An idle engine would be told of in every heartbeat: nothing at all is better than zeros.
    assert await shared.registry.reports() == {}
    async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False) as http:
        assert "mooncake_sidecar_engine_metrics_missing 1.0" in (await http.get("/metrics")).text
    assert "--disable-log-stats" in sidecar.log()
    draining = sidecar.drain()
    said, _ = await asyncio.to_thread(draining.communicate, timeout=15)
    assert draining.returncode == 0, said


async def test_an_engine_is_registered_with_what_it_is(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine, max_batch=64, topology_domain="rack-1", advertised_url="http://10.0.0.1:8000")
    await registered(shared)
    instance = await shared.instance("engine-0")
    assert instance is not None
    assert (instance.role, instance.state, instance.epoch) == (Role.PREFILL, InstanceState.READY, 1)
    assert instance.url == "http://10.0.0.1:8000"
    assert (instance.block_size_tokens, instance.kv_capacity_tokens) == (BLOCK, 200 * BLOCK)
    assert instance.engine_version == "0.32.0"
    assert instance.max_model_len_tokens > 0
    assert (instance.max_batch, instance.topology_domain) == (64, "rack-1")


async def test_what_the_engine_computes_and_evicts_is_in_the_index_and_gone_from_it(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine)
    compute(engine, 1000)
    first = keys(engine)
    assert len(first) == 4
    await agrees(shared, engine)
    assert max((await shared.index.match(first[:1]))["engine-0"]) <= 1
    for number in range(12):
        compute(engine, 5000 + 1000 * number, blocks=20)
    assert set(first) - set(keys(engine))
    await agrees(shared, engine, without=first)


async def test_events_from_before_the_sidecar_began_are_replayed(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    compute(engine, 1000)
    compute(engine, 9000)
    start_sidecar(engine)
    await agrees(shared, engine)


async def test_events_lost_on_the_way_are_asked_for_again(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    engine.post("/simulator/faults", {"drop_events": 2})
    for number in range(4):
        compute(engine, 20_000 + 1000 * number)
    await agrees(shared, engine)
    assert await registered(shared) == 1


async def test_events_that_cannot_be_had_again_begin_a_new_epoch(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    before = keys(engine)
    engine.post("/simulator/faults", {"lose_events": 1})
    compute(engine, 20_000)
    compute(engine, 30_000)
    await registered(shared, after=1)

    async def only_what_is_sure() -> bool:
        held = await shared.held(keys(engine), "engine-0")
        return len(held) == 4 and not held & set(before)

    await until(only_what_is_sure)


async def test_a_sidecar_that_was_killed_goes_on_where_it_was_in_the_same_epoch(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    sidecar = start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    sidecar.kill()
    compute(engine, 20_000)
    sidecar.start()
    await agrees(shared, engine)
    assert await registered(shared) == 1
    assert '"resumed": true' in sidecar.log()


async def test_a_sidecar_that_was_killed_while_the_engine_restarted_begins_a_new_epoch(
    simulated: Simulated, engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    sidecar = start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    before = keys(engine)
    sidecar.kill()
    engine.kill()
    again = simulated.engine(
        "--num-gpu-blocks-override", "200", events=True, base=engine.base, environ=AS_BYTES
    )
    compute(again, 50_000)
    sidecar.start()
    await registered(shared, after=1)
    await agrees(shared, again, without=before)


async def test_a_dead_engine_leaves_the_registry_at_once_and_comes_back_under_a_new_epoch(
    simulated: Simulated, engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    before = keys(engine)
    engine.kill()

    async def gone() -> bool:
        return await shared.instance("engine-0") is None and not await shared.held(before, "engine-0")

    await until(gone, within_s=4)
    again = simulated.engine(
        "--num-gpu-blocks-override", "200", events=True, base=engine.base, environ=AS_BYTES
    )
    await registered(shared, after=1)
    compute(again, 1000, blocks=2)
    await agrees(shared, again, without=before)


async def test_a_cleared_cache_is_a_new_epoch(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    before = keys(engine)
    engine.post("/reset_prefix_cache", {})
    compute(engine, 40_000)
    await registered(shared, after=1)
    await agrees(shared, engine, without=before)


async def test_redis_that_lost_its_memory_is_filled_again_with_what_happened_meanwhile(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView, redis_server: RedisServer
) -> None:
    sidecar = start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    redis_server.kill()
    compute(engine, 20_000)
    redis_server.restart()
    await agrees(shared, engine)
    compute(engine, 30_000)
    await agrees(shared, engine)
    assert sidecar.status()["shared_state_away"] is False


async def test_redis_that_hung_for_long_ends_with_an_index_that_is_right(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView, redis_server: RedisServer
) -> None:
    sidecar = start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    redis_server.pause()

    async def noticed() -> bool:
        return bool(sidecar.status().get("shared_state_away"))

    compute(engine, 20_000)
    await until(noticed)
    redis_server.resume()
    await agrees(shared, engine)


async def test_a_redis_that_is_demoted_is_left_and_its_successor_filled(
    engine: SimulatedProcess, start_sidecar: Start, redis_server: RedisServer, tmp_path: Path
) -> None:
    successor = start_redis(tmp_path)
    async with Service(redis_server.port) as service:
        start_sidecar(engine, redis_url=f"redis://127.0.0.1:{service.port}")
        before, after = SharedView(redis_server), SharedView(successor)
        for view in (before, after):
            await view.open()
        await asyncio.to_thread(compute, engine, 1000)
        await agrees(before, engine)
        with redis_server.client() as admin:
            admin.replicaof("127.0.0.1", 1)
            service.leads_to = successor.port
            await asyncio.to_thread(compute, engine, 20_000)
            await agrees(after, engine)
            admin.replicaof("NO", "ONE")
        for view in (before, after):
            await view.close()
    successor.stop()


async def test_a_drain_waits_for_what_runs_and_for_what_is_promised(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView, redis_server: RedisServer
) -> None:
    sidecar = start_sidecar(engine)
    await registered(shared)
    client = RespClient(redis_server.url)
    await client.connect()
    ledger = RedisLedger(client, prefix=ledger_prefix(NAMESPACE), heartbeat_ttl_s=60)
    promise = Reservation("r", "engine-0", 1.0, "elsewhere", 10, 1.0, 2.0)
    assert await ledger.reserve(promise, Limits(), 0.0) is None
    command = sidecar.drain()

    async def marked() -> bool:
        instance = await shared.instance("engine-0")
        return instance is not None and instance.state is InstanceState.DRAINING

    await until(marked)
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(2.0)
    ledger.release("r", 1.0)
    output, _ = await asyncio.to_thread(command.communicate, timeout=15)
    assert command.returncode == 0, output
    assert b'"idle"' in output
    assert sidecar.terminate() == 0
    assert await shared.instance("engine-0") is None
    await ledger.close()
    await client.close()


@pytest.mark.parametrize("seen", [True, False], ids=["and was seen to be gone", "between two looks"])
async def test_an_engine_that_comes_back_in_its_pod_after_its_pre_stop_hook_is_given_work_again(
    simulated: Simulated, engine: SimulatedProcess, start_sidecar: Start, shared: SharedView, seen: bool
) -> None:
    """A container that fails its liveness probe has its hook run, and is then started again."""
    sidecar = start_sidecar(engine)
    first = await registered(shared)
    command = sidecar.drain()
    output, _ = await asyncio.to_thread(command.communicate, timeout=20)
    assert command.returncode == 0, output
    assert sidecar.process is not None
    if not seen:
        sidecar.process.send_signal(signal.SIGSTOP)
    engine.kill()

    async def gone() -> bool:
        return await shared.instance("engine-0") is None

    if seen:
        await until(gone)
    simulated.engine("--num-gpu-blocks-override", "200", events=True, base=engine.base, environ=AS_BYTES)
    sidecar.process.send_signal(signal.SIGCONT)
    await registered(shared, after=first)
    again = await shared.instance("engine-0")
    assert again is not None
    assert again.state is InstanceState.READY
    assert sidecar.status()["draining"] is False


async def test_an_engine_that_dies_in_its_hook_and_is_back_between_two_beats_is_another(
    simulated: Simulated, engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    sidecar = start_sidecar(engine, heartbeat_s=3.0)
    first = await registered(shared)
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        draining = asyncio.ensure_future(http.post(f"{sidecar.url}/drain"))

        async def marked() -> bool:
            instance = await shared.instance("engine-0")
            return instance is not None and instance.state is InstanceState.DRAINING

        await until(marked)
        engine.kill()
        assert (await draining).json() == {"outcome": "gone"}
    simulated.engine("--num-gpu-blocks-override", "200", events=True, base=engine.base, environ=AS_BYTES)
    await registered(shared, after=first)
    again = await shared.instance("engine-0")
    assert again is not None
    assert again.state is InstanceState.READY


async def test_a_drain_that_takes_too_long_says_so(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView, redis_server: RedisServer
) -> None:
    sidecar = start_sidecar(engine)
    await registered(shared)
    client = RespClient(redis_server.url)
    await client.connect()
    ledger = RedisLedger(client, prefix=ledger_prefix(NAMESPACE), heartbeat_ttl_s=60)
    await ledger.reserve(Reservation("r", None, 1.0, "engine-0", 10, 1.0, 2.0), Limits(), 0.0)
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        answer = await http.post(f"{sidecar.url}/drain", params={"timeout_s": 1.5})
    assert (answer.status_code, answer.json()) == (504, {"outcome": "timeout"})
    await ledger.close()
    await client.close()


async def test_beside_a_dead_sidecar_and_without_metrics_a_drain_waits_for_who_is_connected_and_no_longer(
    simulated: Simulated, start_sidecar: Start, shared: SharedView
) -> None:
    mute = simulated.engine("--disable-log-stats", "--time-scale", "1", events=True, environ=AS_BYTES)
    sidecar = start_sidecar(mute, block_size_tokens=BLOCK, drain_timeout_s=600)
    await registered(shared)
    sidecar.kill()
    endless = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=mute.url, trust_env=False, timeout=None) as http,
        http.stream("POST", "/v1/completions", json=endless) as stream,
    ):
        chunks = stream.aiter_bytes()
        await anext(chunks)  # held on to: an iterator that nobody holds closes its connection
        draining = sidecar.drain()
        # Beyond the time after which schedulers have forgotten the instance.
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(draining.wait, FORGOTTEN_AFTER_S + 2.0)
    said, _ = await asyncio.to_thread(draining.communicate, timeout=60)
    assert draining.returncode == 0, said
    assert b"the engine is idle" in said


async def test_without_redis_and_without_metrics_a_drain_ends_when_nobody_is_connected(
    simulated: Simulated, start_sidecar: Start, shared: SharedView, redis_server: RedisServer
) -> None:
    mute = simulated.engine("--disable-log-stats", events=True, environ=AS_BYTES)
    sidecar = start_sidecar(mute, block_size_tokens=BLOCK, drain_timeout_s=600)
    await registered(shared)
    redis_server.kill()
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        answer = await http.post(f"{sidecar.url}/drain")
    assert (answer.status_code, answer.json()) == (200, {"outcome": "idle"})


async def test_told_to_end_a_sidecar_of_an_idle_engine_deregisters_it_and_ends(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    sidecar = start_sidecar(engine)
    await registered(shared)
    assert sidecar.terminate() == 0
    assert await shared.instance("engine-0") is None
    sidecar.start()
    await agrees(shared, engine)


async def test_probes_and_metrics_say_how_it_stands(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    sidecar = start_sidecar(engine)
    compute(engine, 1000)
    await agrees(shared, engine)
    async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False) as http:
        assert (await http.get("/healthz")).status_code == 200
        await ready(http)
        metrics = (await http.get("/metrics")).text
        assert "mooncake_sidecar_registered 1.0" in metrics
        assert "mooncake_sidecar_blocks 4.0" in metrics
        assert "mooncake_index_events_total" in metrics
        assert "mooncake_index_gaps_total" in metrics
        engine.kill()

        async def not_ready() -> bool:
            return (await http.get("/readyz")).status_code == 503

        await until(not_ready)
        assert (await http.get("/healthz")).status_code == 200


async def test_an_instance_stays_ready_while_redis_is_away_and_comes_back_empty(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView, redis_server: RedisServer
) -> None:
    sidecar = start_sidecar(engine)
    await agrees(shared, engine)
    async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False) as http:

        async def away() -> bool:
            return bool((await http.get("/status")).json()["shared_state_away"])

        async def back() -> bool:
            # However it stands with Redis meanwhile.
            assert (await http.get("/readyz")).status_code == 200
            return not await away()

        await ready(http)
        redis_server.kill()
        await until(away)
        assert (await http.get("/readyz")).status_code == 200
        redis_server.restart()
        await until(back)
        await agrees(shared, engine)


async def test_the_load_of_the_engine_reaches_the_schedulers(
    engine: SimulatedProcess, start_sidecar: Start, shared: SharedView
) -> None:
    start_sidecar(engine, time_scale=10.0)

    async def reported() -> bool:
        return "engine-0" in await shared.registry.reports()

    await until(reported)
    report = (await shared.registry.reports())["engine-0"]
    assert (report.running, report.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "is not set"), ("{", "MOONCAKE_SIDECAR_CONFIG"), ('{"instance": "a"}', "cluster: Field required")],
)
def test_a_bad_configuration_ends_the_process_with_what_is_wrong(text: str, complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_sidecar.engine"],
        env={"MOONCAKE_SIDECAR_CONFIG": text, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert complaint in done.stderr
