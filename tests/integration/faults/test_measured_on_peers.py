"""What two other routers did when it was tried (entry 26 of docs/faults.md), and what must happen instead."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mooncake_scheduler.gateway.breaker import BreakerState
from mooncake_testing.gateway import gateway
from mooncake_testing.raw_client import RawClient
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.scripted_pools import is_error, pools

CONNECTORS = ["MooncakeConnector", "NixlConnector"]


def legs(wanted: list[ScriptedEngine]) -> int:
    return sum(len(engine.legs) for engine in wanted)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_decode_that_dies_in_its_stream_ends_it_with_an_error_and_the_end_mark(
    tmp_path: Path, connector: str
) -> None:
    async with pools(tmp_path, connector) as (running, _, decode):
        decode[0].script = [Act(die_after=3)]
        answer = await running.complete(stream=True, max_tokens=20)
        events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
        assert len(events) == 5
        assert json.loads(events[3])["error"]["type"] == "server_error"
        assert events[4] == "[DONE]"
        assert "127.0.0.1" not in answer.text
        await running.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_decode_that_dies_in_a_whole_answer_is_replaced_or_owned_up_to(
    tmp_path: Path, connector: str
) -> None:
    async with pools(tmp_path, connector, decode=2) as (running, _, decode):
        acts = [Act(die_after=0)]
        for engine in decode:
            engine.script = acts
        assert (await running.complete()).status_code == 200
        for engine in decode:
            engine.usual = Act(die_after=0)
        is_error(await running.complete(), 502)
        await running.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_503_reaches_the_client_with_its_retry_after_and_decode_is_not_asked(
    tmp_path: Path, connector: str, stream: bool
) -> None:
    async with pools(tmp_path, connector, prefill=2) as (running, prefill, decode):
        for engine in prefill:
            words = json.dumps({"error": {"message": f"{engine.url} is full", "code": 503}}).encode()
            engine.usual = Act(status=503, body=words, headers={"Retry-After": "23"})
        answer = await running.complete(stream=stream)
        is_error(answer, 503)
        assert answer.headers["retry-after"] == "23"
        assert [len(engine.legs) for engine in prefill] == [1, 1], "each was tried, once"
        assert legs(decode) == 0
        await running.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("decodes", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_429_reaches_the_client_with_its_retry_after_and_prefill_ran_once(
    tmp_path: Path, connector: str, decodes: int, stream: bool
) -> None:
    async with pools(tmp_path, connector, prefill=2, decode=decodes) as (running, prefill, decode):
        for engine in decode:
            engine.usual = Act(status=429, headers={"Retry-After": "11"})
        answer = await running.complete(stream=stream)
        is_error(answer, 429)
        assert answer.headers["retry-after"] == "11"
        assert [len(engine.legs) for engine in decode] == [1] * decodes
        assert legs(prefill) == 1
        await running.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_400_is_the_answer_and_decode_is_not_asked(
    tmp_path: Path, connector: str, stream: bool
) -> None:
    words = b'{"error":{"message":"top_p must be in (0, 1]","type":"BadRequestError","param":"top_p"}}'
    async with pools(tmp_path, connector, prefill=2) as (running, prefill, decode):
        for engine in prefill:
            engine.usual = Act(status=400, body=words)
        error = is_error(await running.complete(stream=stream), 400)
        assert (error["message"], error["param"]) == ("top_p must be in (0, 1]", "top_p")
        assert (legs(prefill), legs(decode)) == (1, 0)
        await running.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_gone_during_prefill_ends_it_and_decode_completes_nothing_alone(
    tmp_path: Path, connector: str, stream: bool
) -> None:
    async with pools(tmp_path, connector) as (running, prefill, decode):
        prefill[0].usual = Act(stall=True)
        client = await RawClient.ask(running.port, stream=stream)
        leg = await prefill[0].leg()
        client.leave()
        await asyncio.wait_for(leg.aborted.wait(), 5)
        await running.settled()
        assert legs(decode) == 0


# -- entries 3 and 4: a prefill that fails, while a decode might be waiting for it


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("how", ["killed", "500"])
async def test_a_prefill_that_fails_under_way_leaves_no_decode_waiting_for_it(
    tmp_path: Path, connector: str, how: str
) -> None:
    async with pools(tmp_path, connector, first_token_timeout_s=5) as (running, prefill, decode):
        release = asyncio.Event()
        prefill[0].usual = Act(hold=release, status=500, body=b"{}")
        asked = asyncio.ensure_future(running.complete())
        await prefill[0].leg()
        if how == "killed":
            await prefill[0].kill()
        else:
            release.set()
        answer = await asked
        assert answer.status_code in (200, 502)
        for leg in decode[0].legs:
            # Decode may compute the prompt itself, but never wait for KV that will not come.
            assert "kv_transfer_params" not in leg.body
        await running.settled()


# -- entry 6: whose fault it is


@pytest.mark.parametrize("status", [400, 422, 429, 503])
async def test_answers_that_say_nothing_of_an_engines_health_never_take_it_out(
    tmp_path: Path, status: int
) -> None:
    engine = ScriptedEngine("b")
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        engine.script = [Act(status=status, body=b"{}") for _ in range(20)]
        for _ in range(20):
            is_error(await running.complete(), status)
        breaker = running.scheduler.services.roster.members["b"].breaker
        assert (breaker.state, breaker.faults) == (BreakerState.CLOSED, 0)
        assert (await running.complete()).status_code == 200


async def test_a_400_on_trial_neither_closes_the_breaker_nor_keeps_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_scheduler.gateway.breaker.FIRST_OPEN_S", 0.2)
    engine = ScriptedEngine("b")
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        breaker = running.scheduler.services.roster.members["b"].breaker
        engine.usual = Act(status=500)
        while breaker.state is BreakerState.CLOSED:
            is_error(await running.complete(), 502)
        seen = len(engine.legs)
        is_error(await running.complete(), 503)
        assert len(engine.legs) == seen, "an open breaker lets nothing through"
        await asyncio.sleep(0.3)
        engine.usual = Act(status=400, body=b"{}")
        is_error(await running.complete(), 400)
        assert breaker.state is BreakerState.HALF_OPEN
        engine.usual = Act()
        async with asyncio.timeout(5):
            while (await running.complete()).status_code != 200:
                await asyncio.sleep(0.05)
        assert breaker.state is BreakerState.CLOSED
