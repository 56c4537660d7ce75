"""Entries 21 and 24: what a gateway costs by itself; `make bench-router` measures how much."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from mooncake_scheduler.gateway.tokens import ModelFolder
from mooncake_testing.gateway import gateway
from mooncake_testing.raw_client import RawClient, request_bytes
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.toy_model import write_toy_model
from mooncake_testing.waiting import until


async def test_connections_to_an_engine_are_used_again_and_no_more_than_requests_at_once(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine("b0")
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        upstream = running.scheduler.services.roster.members["b0"].upstream
        for _ in range(20):
            assert (await running.complete()).status_code == 200
        # One for the requests, and perhaps one for the probe of its health.
        assert len(upstream.open) <= 2
        hold = asyncio.Event()
        engine.usual = Act(hold=hold)
        asked = [asyncio.ensure_future(running.complete()) for _ in range(16)]
        await engine.leg(36)
        hold.set()
        await asyncio.gather(*asked)
        for _ in range(20):
            await asyncio.gather(*(running.complete() for _ in range(4)))
        assert len(upstream.open) <= 18


async def test_connections_that_lie_idle_make_no_request_dearer(tmp_path: Path) -> None:
    engine = ScriptedEngine("b0")
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        client = await RawClient.connect(running.port)
        body = request_bytes({})

        async def cpu_s(count: int) -> float:
            began_s = time.process_time()
            for _ in range(count):
                client.writer.write(body)
                assert (await client.answer())[0] == 200
            return time.process_time() - began_s

        await cpu_s(50)
        few_s = min([await cpu_s(100) for _ in range(3)])
        hold = asyncio.Event()
        engine.usual = Act(hold=hold)
        others = [await RawClient.ask(running.port) for _ in range(200)]
        await until(lambda: len(running.scheduler.datapath.flows) == 200)
        hold.set()
        for other in others:
            assert (await other.answer())[0] == 200
        assert len(running.scheduler.services.roster.members["b0"].upstream.open) > 100
        many_s = min([await cpu_s(100) for _ in range(3)])
        assert many_s < 2 * few_s, (few_s, many_s)
        for each in (client, *others):
            each.leave()


async def test_a_long_text_being_tokenised_holds_nobody_else_up(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "model")
    folder = ModelFolder(model)
    engine = ScriptedEngine("b0")

    def tokenize(body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return folder.encode(body["prompt"], add_special_tokens=True)
        return folder.encode(folder.render(body["messages"], None), add_special_tokens=False)

    engine.tokenize = tokenize
    # However busy the machine is: what is looked at is who is served meanwhile.
    settings = {"model_path": str(model), "tokenise_timeout_s": 100}
    async with engines(engine), gateway(tmp_path, [engine.instance()], **settings) as running:
        member = running.scheduler.services.roster.members["b0"]
        await until(lambda: member.tokenizer_compared is not None)
        text = "the quick brown fox jumps over the lazy dog. " * 80_000
        long = request_bytes({"prompt": text, "max_tokens": 1})
        client = await RawClient.connect(running.port)
        before = len(engine.legs)
        client.writer.write(long)
        await until(lambda: bool(running.scheduler.datapath.flows))
        short = await RawClient.connect(running.port)
        served = 0
        while all(len(leg.raw) < 1_000 for leg in engine.legs[before:]):
            short.writer.write(request_bytes({"prompt": [served, 2, 3]}))
            assert (await short.answer())[0] == 200
            served += 1
        assert served >= 3, "the short ones waited until the long one was tokenised"
        assert (await client.answer())[0] == 200
        assert "mooncake_event_loop_lag_seconds_bucket" in running.scheduler.metrics_text().decode()
        client.leave()
        short.leave()
