"""Entries 17 and 18 without Kubernetes: who leaves gets no more work, and ends its streams.

What a watch of the Kubernetes API may lose (readiness, labels, deletions) is the operator's; here the
registry is polled whole, so there is no event that could be lost.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from mooncake_core.registry import InstanceState, Role
from mooncake_testing.gateway import gateway, write_instances
from mooncake_testing.raw_client import RawClient
from mooncake_testing.redis import RedisServer
from mooncake_testing.scheduler_process import NAMESPACE, SchedulerProcess, announced
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.waiting import until


@pytest.mark.parametrize("how", ["draining", "gone"])
async def test_an_instance_that_is_leaving_gets_nothing_more_and_finishes_what_it_has(
    tmp_path: Path, how: str
) -> None:
    leaving, staying = ScriptedEngine("leaving"), ScriptedEngine("staying")
    leaving.usual = Act(tokens=30, gap_s=0.05)
    async with engines(leaving, staying), gateway(tmp_path, [leaving.instance()]) as running:
        streaming = asyncio.ensure_future(running.stream(max_tokens=30))
        await leaving.leg()
        left = leaving.instance(state=InstanceState.DRAINING)
        listed = [left, staying.instance()] if how == "draining" else [staying.instance()]
        write_instances(tmp_path / "instances.json", listed)
        roster = running.scheduler.services.roster
        await until(lambda: "staying" in roster.members)
        for _ in range(20):
            assert (await running.complete()).status_code == 200
        assert (len(leaving.legs), len(staying.legs)) == (1, 20)
        text = await streaming
        if how == "draining":
            assert text.count("data: ") == 31
            assert "error" not in text
        else:
            # Whoever is not listed is not there any more: its stream may break off, but not in silence.
            assert text.endswith("data: [DONE]\n\n")
            assert text.count("data: ") == 31 or '"error"' in text
        await running.settled()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_drain_asked_for_at_the_admin_port_ends_no_stream_and_admits_no_other(
    tmp_path: Path, redis_server: RedisServer, role: Role
) -> None:
    fleet = [
        ScriptedEngine(f"{each}-{n}", each, "MooncakeConnector")
        for each in (Role.PREFILL, Role.DECODE)
        for n in range(2)
    ]
    of_role = [engine for engine in fleet if engine.role is role]
    shared = {"redis_url": redis_server.url, "namespace": NAMESPACE}
    async with (
        engines(*fleet),
        announced(redis_server, [engine.instance() for engine in fleet]),
        gateway(tmp_path, [], **shared) as running,
    ):
        roster = running.scheduler.services.roster
        await until(lambda: len(roster.members) == 4)
        for engine in fleet:
            engine.usual = Act(tokens=30, gap_s=0.03)
        streams = [asyncio.ensure_future(running.stream(max_tokens=30)) for _ in range(6)]
        await until(lambda: sum(len(engine.legs) for engine in fleet[2:]) == 6)
        drained = max(of_role, key=lambda engine: len(engine.legs))
        before = len(drained.legs)
        async with httpx.AsyncClient(trust_env=False) as admin:
            url = f"http://127.0.0.1:{running.scheduler.admin_port}/instances/{drained.name}/drain"
            assert (await admin.post(url)).status_code == 200
            for engine in fleet:
                engine.usual = Act()
            for _ in range(12):
                assert (await running.complete()).status_code == 200
            assert len(drained.legs) == before
            for text in await asyncio.gather(*streams):
                assert text.count("data: ") == 31
                assert "error" not in text
            assert (await admin.delete(url)).status_code == 200
        for _ in range(40):
            await running.complete()
        assert len(drained.legs) > before, "and it serves again when it is told to"


async def test_an_instance_that_came_back_under_another_address_is_found_there(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    old, new = ScriptedEngine("b0"), ScriptedEngine("b0")
    shared = {"redis_url": redis_server.url, "namespace": NAMESPACE}
    async with (
        engines(old, new),
        announced(redis_server, [old.instance()]) as there,
        gateway(tmp_path, [], **shared) as running,
    ):
        roster = running.scheduler.services.roster
        await until(lambda: "b0" in roster.members)
        assert (await running.complete()).status_code == 200
        there.instances["b0"] = await there.registry.register(new.instance())
        await until(lambda: roster.members["b0"].instance.url == new.url)
        for _ in range(5):
            assert (await running.complete()).status_code == 200
        assert (len(old.legs), len(new.legs)) == (1, 5), "nothing goes to the address that it had"


async def test_a_scheduler_that_is_told_to_end_finishes_its_streams_first(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = ScriptedEngine("b0")
    engine.usual = Act(tokens=40, gap_s=0.05)
    async with engines(engine), announced(redis_server, [engine.instance()]):
        process = SchedulerProcess(tmp_path, redis_url=redis_server.url)
        try:
            await process.ready()
            client = await RawClient.ask(process.serving_port, stream=True, max_tokens=40)
            await client.reader.readuntil(b"data: ")
            process.terminate()
            text = b"data: " + await asyncio.wait_for(client.reader.readuntil(b"[DONE]"), 20)
            assert text.count(b"data: ") == 41
            assert b'"error"' not in text
            client.leave()
            assert await asyncio.to_thread(process.process.wait, 20) == 0
            with pytest.raises(OSError, match="Connect"):
                await RawClient.ask(process.serving_port)
        finally:
            process.end()
