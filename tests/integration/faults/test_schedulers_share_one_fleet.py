"""Entries 9, 12, 20 and 22: several schedulers before one fleet, one that is killed, metrics that froze."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_core.registry import EngineReport
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.redis import RedisServer
from mooncake_testing.scheduler_process import NAMESPACE, SchedulerProcess, announced
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.sidecars import SharedView, SidecarProcess
from mooncake_testing.simulated import Simulated
from mooncake_testing.waiting import until

PROFILE = "llama3-70b-8xa800"


@asynccontextmanager
async def schedulers(
    folder: Path, redis: RedisServer, count: int, fleet: Sequence[ScriptedEngine], **settings: Any
) -> AsyncIterator[list[Gateway]]:
    """Schedulers in this loop that share a Redis in which the fleet is announced.

    Model time goes slowly: what is predicted to take 0.2 s shall not be over when a slow machine looks again.
    """
    settings = {"redis_url": redis.url, "namespace": NAMESPACE, "profile": PROFILE, **settings}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engines(*fleet))
        there = await stack.enter_async_context(announced(redis, [engine.instance() for engine in fleet]))
        running = []
        for _ in range(count):
            one = await stack.enter_async_context(gateway(folder, [], time_scale=0.01, **settings))
            one.announced = there  # type: ignore[attr-defined]
            running.append(one)
        for one in running:
            await until(lambda one=one: len(one.scheduler.services.roster.members) == len(fleet))  # type: ignore[misc]
        yield running


def promised(one: Gateway) -> int:
    """Requests that this scheduler knows to be under way, its own and those of its peers."""
    services = one.scheduler.services
    return sum(load.batch + load.arriving for load in services.ledger.loads(services.clock.now_s()).values())


async def test_each_of_three_schedulers_sees_the_load_that_the_others_gave(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    fleet = [ScriptedEngine(f"b{n}") for n in range(3)]
    async with schedulers(tmp_path, redis_server, 3, fleet) as running:
        # By chance alone each round would come out even in two of nine cases.
        for number in range(6):
            hold = asyncio.Event()
            for engine in fleet:
                engine.usual = Act(hold=hold)
            before = Counter({engine.name: len(engine.legs) for engine in fleet})
            asked = []
            for place, one in enumerate(running):
                prompt = [number, place, *range(2_000)]
                asked.append(asyncio.ensure_future(one.complete(prompt=prompt)))
                for each in running:
                    await until(lambda each=each, place=place: promised(each) == place + 1)  # type: ignore[misc]
            asked_so_far = 3 * (number + 1)
            await until(lambda wanted=asked_so_far: sum(len(e.legs) for e in fleet) == wanted)  # type: ignore[misc]
            after = Counter({engine.name: len(engine.legs) for engine in fleet})
            assert after - before == Counter(b0=1, b1=1, b2=1)
            hold.set()
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
            for each in running:
                await until(lambda each=each: promised(each) == 0)  # type: ignore[misc]


async def spread(
    running: Sequence[Gateway], fleet: Sequence[ScriptedEngine], count: int, before: int = 0
) -> list[int]:
    """How many of `count` requests each engine gets while none of them ends; `before` came earlier."""
    hold = asyncio.Event()
    for engine in fleet:
        engine.usual = Act(hold=hold)
    had = [len(engine.legs) for engine in fleet]
    asked = []
    for number in range(count):
        one = running[number % len(running)]
        asked.append(asyncio.ensure_future(one.complete(prompt=[before + number, *range(1_000)])))
        for each in running:
            await until(lambda each=each, number=number: promised(each) == number + 1)  # type: ignore[misc]
    await until(lambda: sum(len(engine.legs) for engine in fleet) == sum(had) + count)
    got = [len(engine.legs) - earlier for engine, earlier in zip(fleet, had, strict=True)]
    hold.set()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * count
    for each in running:
        await until(lambda each=each: promised(each) == 0)  # type: ignore[misc]
    return got


def foreign(one: Gateway) -> set[str]:
    """Instances on which this scheduler sees work that came past the ledger."""
    return set(one.scheduler.services.placer.worlds.reported.foreign)


FULL = {"running": 40, "waiting": 10, "kv_usage": 0.9}
"""What an engine says that others use as well."""


@pytest.mark.parametrize("frozen", ["idle", "full", "one_full", "gone"])
async def test_reports_that_froze_neither_draw_the_herd_nor_stop_it(
    tmp_path: Path, redis_server: RedisServer, frozen: str
) -> None:
    fleet = [ScriptedEngine(f"b{n}") for n in range(3)]
    settings = {"admission": {"mode": "predictive"}, "slo": {"ttft_s": 30, "tbt_s": 0.2}}
    async with schedulers(tmp_path, redis_server, 2, fleet, **settings) as running:
        there = running[0].announced  # type: ignore[attr-defined]
        clock = running[0].scheduler.services.clock
        long_ago_s = clock.now_s() - 300 * clock.scale
        full = EngineReport(running=256, waiting=999, kv_usage=1.0, at_s=long_ago_s)
        said = {
            "idle": {"b0": EngineReport(at_s=long_ago_s)},
            "full": {name: full for name in ("b0", "b1", "b2")},
            "one_full": {"b0": full},
            "gone": {},
        }
        there.reports.update(said[frozen])
        await there.beat()
        await until(
            lambda: all(len(one.scheduler.services.roster.reports) == len(said[frozen]) for one in running)
        )
        assert await spread(running, fleet, 12) == [4, 4, 4]


async def test_a_fresh_report_of_work_past_the_ledger_keeps_new_work_away_until_it_is_stale(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    fleet = [ScriptedEngine(f"b{n}") for n in range(3)]
    async with schedulers(tmp_path, redis_server, 2, fleet) as running:
        there = running[0].announced  # type: ignore[attr-defined]
        there.reports["b0"] = EngineReport(**FULL, at_s=running[0].scheduler.services.clock.now_s())
        await there.beat()
        await until(lambda: all(foreign(one) == {"b0"} for one in running))
        # As above, but for its age: were age not looked at, one of the two tests had to fail.
        assert await spread(running, fleet, 6) == [0, 3, 3]
        # Nothing more is heard; what was said is not believed for ever.
        await until(lambda: all(foreign(one) == set() for one in running))
        assert await spread(running, fleet, 6, before=6) == [2, 2, 2]


async def test_a_report_of_our_own_work_alone_changes_nothing(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    fleet = [ScriptedEngine(f"b{n}") for n in range(3)]
    async with schedulers(tmp_path, redis_server, 1, fleet) as running:
        hold = asyncio.Event()
        for engine in fleet:
            engine.usual = Act(hold=hold)
        asked = [asyncio.ensure_future(running[0].complete(prompt=[n, *range(1_000)])) for n in range(3)]
        await until(lambda: sum(len(engine.legs) for engine in fleet) == 3)
        there = running[0].announced  # type: ignore[attr-defined]
        for engine in fleet:
            now_s = running[0].scheduler.services.clock.now_s()
            there.reports[engine.name] = EngineReport(running=len(engine.legs), at_s=now_s)
        await there.beat()
        await until(lambda: len(running[0].scheduler.services.roster.reports) == 3)
        assert foreign(running[0]) == set()
        hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3


async def test_four_schedulers_that_are_asked_at_once_never_fill_an_engine_of_eight_with_nine(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = ScriptedEngine("b0")
    hold = asyncio.Event()
    engine.usual = Act(hold=hold)
    processes: list[SchedulerProcess] = []
    async with engines(engine), announced(redis_server, [engine.instance(max_batch=8)]):
        try:
            for number in range(4):
                processes.append(
                    SchedulerProcess(
                        tmp_path, f"scheduler-{number}", redis_url=redis_server.url, profile=PROFILE,
                        admission={"mode": "predictive"}, slo={"ttft_s": 30.0},
                    )
                )  # fmt: skip
            for process in processes:
                await process.ready()
            async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 2_000}
                asked = [
                    asyncio.ensure_future(client.post(f"{process.url}/v1/completions", json=body))
                    for _ in range(10)
                    for process in processes
                ]
                await until(lambda: sum(each.done() for each in asked) >= 32)
                await asyncio.sleep(0.3)
                refused = [each.result() for each in asked if each.done()]
                assert len(engine.legs) == 8
                assert [answer.status_code for answer in refused] == [429] * 32
                assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
                assert {answer.json()["error"]["code"] for answer in refused} == {"tbt"}
                hold.set()
                served = [answer.status_code for answer in await asyncio.gather(*asked)]
                assert served.count(200) == 8
        finally:
            for process in processes:
                process.end()


async def test_after_kill_9_of_the_scheduler_its_successor_finds_what_the_engines_hold(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    prompts = [[number, *range(1_000, 1_160)] for number in range(8)]

    async def ask_all(url: str) -> list[int]:
        cached = []
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            for prompt in prompts:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
                answer = await client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                details = answer.json()["usage"]["prompt_tokens_details"] or {}
                cached.append(details.get("cached_tokens") or 0)
        return cached

    view = SharedView(redis_server)
    with Simulated() as simulated:
        fleet = [simulated.engine("--num-gpu-blocks-override", "500", events=True) for _ in range(3)]
        sidecars = [
            SidecarProcess(
                tmp_path, redis_server, engine.url, instance=f"b{n}", role="both", pool="both",
                journal_dir=str(tmp_path / f"journal-{n}"),
            )
            for n, engine in enumerate(fleet)
        ]  # fmt: skip
        scheduler = SchedulerProcess(tmp_path, redis_url=redis_server.url, profile=PROFILE)
        await view.open()
        try:
            async with asyncio.timeout(30):
                while len(await view.registry.instances()) < 3:
                    await asyncio.sleep(0.05)
            await scheduler.ready()
            await asyncio.sleep(1)
            assert sum(await ask_all(scheduler.url)) == 0
            holding = {key for engine in fleet for key in engine.get("/simulator/blocks")["keys"]}
            assert len(holding) >= 80
            async with asyncio.timeout(20):
                while len({key for n in range(3) for key in await view.held(holding, f"b{n}")}) < len(
                    holding
                ):
                    await asyncio.sleep(0.05)
            scheduler.kill()
            scheduler.start()
            await scheduler.ready()
            # All ten full blocks of each prompt, wherever they lie.
            assert await ask_all(scheduler.url) == [160] * 8
        finally:
            scheduler.end()
            for sidecar in sidecars:
                sidecar.end()
            await view.close()
