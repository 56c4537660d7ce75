from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.registry import Role
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.sending import Sending
from mooncake_testing.gateway import gateway, write_instances
from mooncake_testing.scripted_engine import Act, ScriptedEngine, Seen, engines
from mooncake_testing.scripted_pools import is_error, pools
from mooncake_testing.waiting import until

MOONCAKE = "MooncakeConnector"


def script(wanted: list[ScriptedEngine], act: Act) -> None:
    """Whichever engine is asked first plays the act; the others behave."""
    acts = [act]
    for engine in wanted:
        engine.script = acts


def freeing(decode: list[ScriptedEngine]) -> list[Seen]:
    """Legs that take staged KV and nothing else."""
    return [leg for engine in decode for leg in engine.legs if leg.body["max_tokens"] == 1]


def answering(decode: list[ScriptedEngine]) -> list[int]:
    """How many other legs each engine got, in order."""
    return sorted(len(engine.legs) - len(freeing([engine])) for engine in decode)


FAULTS = {
    "500": Act(status=500, body=b'{"error":{"message":"CUDA error on 127.0.0.1"}}'),
    "dies before the head": Act(die_after=0),
    "503": Act(status=503, headers={"Retry-After": "7"}),
    "429": Act(status=429, headers={"Retry-After": "7"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_that_fails_is_tried_on_another_instance(
    tmp_path: Path, fault: str, stream: bool
) -> None:
    async with pools(tmp_path, prefill=2) as (running, prefill, decode):
        script(prefill, FAULTS[fault])
        answer = await running.complete(stream=stream)
        assert answer.status_code == 200
        assert sorted(len(engine.legs) for engine in prefill) == [1, 1]
        assert len(decode[0].legs) == 1
        await running.settled()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_that_fails_before_its_first_token_is_tried_on_another_instance(
    tmp_path: Path, fault: str, stream: bool
) -> None:
    async with pools(tmp_path, decode=2) as (running, _, decode):
        script(decode, FAULTS[fault])
        answer = await running.complete(stream=stream)
        assert answer.status_code == 200
        assert answering(decode) == [1, 1]
        await running.settled()


async def test_staged_kv_that_was_not_touched_goes_to_the_other_decode_without_a_second_prefill(
    tmp_path: Path,
) -> None:
    async with pools(tmp_path, decode=2) as (running, prefill, decode):
        script(decode, FAULTS["503"])
        assert (await running.complete()).status_code == 200
        assert len(prefill[0].legs) == 1
        transfers = {leg.kv["transfer_id"] for engine in decode for leg in engine.legs}
        assert transfers == {prefill[0].legs[0].kv["transfer_id"]}
        await running.settled()


async def test_staged_kv_that_may_have_been_taken_is_staged_anew_under_another_id(tmp_path: Path) -> None:
    async with pools(tmp_path, decode=2) as (running, prefill, decode):
        script(decode, FAULTS["500"])
        assert (await running.complete()).status_code == 200
        first, second = (leg.kv["transfer_id"] for leg in prefill[0].legs)
        assert first != second
        await running.settled()


@pytest.mark.parametrize("connector", [MOONCAKE, "NixlConnector"])
@pytest.mark.parametrize(
    ("act", "status", "failing", "staged"),
    [
        (Act(status=400, body=b"{}"), 400, 1, 1),
        (Act(status=503), 503, 3, 1),
        (Act(status=500), 502, 3, 3),
        (Act(status=500), 200, 2, 2),
    ],
    ids=["client's error", "back-pressure", "fails", "served after all"],
)
async def test_kv_that_was_staged_in_vain_is_freed_by_a_decode_that_has_not_failed(
    tmp_path: Path, connector: str, act: Act, status: int, failing: int, staged: int
) -> None:
    async with pools(tmp_path, connector, decode=4) as (running, prefill, decode):
        acts = [act] * failing
        for engine in decode:
            engine.script = acts
        assert (await running.complete()).status_code == status
        await until(lambda: len(freeing(decode)) == staged)
        await running.settled()
        assert sum(answering(decode)) == failing + (status == 200)
        name = "transfer_id" if connector == MOONCAKE else "remote_request_id"
        freed = [leg.kv[name] for leg in freeing(decode)]
        assert len(set(freed)) == staged
        assert len(prefill[0].legs) == staged + (status == 200)
        assert all(leg.act is engine.usual for engine in decode for leg in freeing([engine]))


async def test_a_decode_that_leaves_once_its_place_is_given_is_replaced_without_a_second_prefill(
    tmp_path: Path,
) -> None:
    async with pools(tmp_path, decode=2, admission={"mode": "predictive"}) as (running, prefill, decode):
        services, gone = running.scheduler.services, []
        seat = services.holding.seat

        async def seat_then_leave(*args: Any, **named: Any) -> Any:
            place = await seat(*args, **named)
            if not gone:
                gone.append(place.id)
                listed = [e.instance() for e in (*prefill, *decode) if e.name not in gone]
                write_instances(tmp_path / "instances.json", listed)
                await services.roster.refresh()
                assert gone[0] not in services.roster.members
            return place

        services.holding.seat = seat_then_leave
        services.holding.needed = lambda *_: True
        assert (await running.complete()).status_code == 200
        assert gone
        assert len(prefill[0].legs) == 1
        assert answering(decode) == [0, 1]
        await running.settled()


async def test_a_decode_whose_stream_begins_with_an_error_is_tried_on_another_instance(
    tmp_path: Path,
) -> None:
    event = b'data: {"error":{"message":"engine dead","code":500}}\n\n'
    async with pools(tmp_path, decode=2) as (running, _, decode):
        script(decode, Act(first_event=event))
        text = await running.stream()
        assert "error" not in text
        assert text.endswith("data: [DONE]\n\n")
        await running.settled()


async def test_a_stream_that_begins_with_the_clients_own_error_becomes_that_answer(tmp_path: Path) -> None:
    event = b'data: {"error":{"message":"too long","type":"BadRequestError","code":400}}\n\n'
    async with pools(tmp_path) as (running, _, decode):
        decode[0].script = [Act(first_event=event)]
        error = is_error(await running.complete(stream=True), 400)
        assert error["message"] == "too long"
        await running.settled()


@pytest.mark.parametrize("act", [Act(die_after=2), Act(end_after=2)], ids=["dies", "ends without its mark"])
@pytest.mark.parametrize("both", [0, 1])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(tmp_path: Path, act: Act, both: int) -> None:
    async with pools(tmp_path, both=both) as (running, _, decode):
        decode[0].script = [act]
        text = await running.stream(max_tokens=10)
        events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "stream_broken"
        assert [json.loads(e)["choices"][0]["text"] for e in events[:-2]] == [" t0", " t1"]
        assert "127.0.0.1" not in text
        await running.settled()


async def test_a_stream_that_stalls_ends_with_an_error_event(tmp_path: Path) -> None:
    async with pools(tmp_path, stall_timeout_s=0.2) as (running, _, decode):
        decode[0].script = [Act(stall_after=2)]
        text = await running.stream(max_tokens=10)
        assert text.count("data: ") == 4
        assert '"error"' in text
        await asyncio.wait_for(decode[0].legs[0].aborted.wait(), 5)
        await running.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_that_never_answers_is_given_up_with_504(tmp_path: Path, stream: bool) -> None:
    settings = {"first_token_timeout_s": 0.2, "request_timeout_s": 1}
    async with pools(tmp_path, **settings) as (running, _, decode):
        decode[0].usual = Act(stall=True)
        error = is_error(await running.complete(stream=stream), 504)
        assert error["type"] == "server_error"
        await asyncio.wait_for(decode[0].legs[0].aborted.wait(), 5)
        await running.settled()


async def test_a_prefill_that_never_answers_is_aborted_and_not_waited_for_by_decode(tmp_path: Path) -> None:
    async with pools(tmp_path, prefill_timeout_s=0.2) as (running, prefill, decode):
        prefill[0].usual = Act(stall=True)
        assert (await running.complete()).status_code == 200
        await asyncio.wait_for(prefill[0].legs[0].aborted.wait(), 5)
        assert "kv_transfer_params" not in decode[0].legs[0].body
        await running.settled()


async def test_an_engine_that_wants_a_key_is_not_the_clients_mistake(tmp_path: Path) -> None:
    async with pools(tmp_path) as (running, prefill, decode):
        prefill[0].usual = Act(status=401, body=b'{"error":"Unauthorized"}')
        error = is_error(await running.complete(), 502)
        assert error["code"] == "engine_refused"
        assert decode[0].legs == []
        await running.settled()


@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_a_4xx_of_an_engine_is_passed_on_without_the_other_leg_or_a_retry(
    tmp_path: Path, which: str
) -> None:
    body = b'{"error":{"message":"temperature must be non-negative","type":"BadRequestError","code":400}}'
    async with pools(tmp_path, prefill=2, decode=2) as (running, prefill, decode):
        for engine in prefill if which == "prefill" else decode:
            engine.usual = Act(status=400, body=body)
        error = is_error(await running.complete(), 400)
        assert error["message"] == "temperature must be non-negative"
        assert sum(len(engine.legs) for engine in prefill) == 1
        assert sum(answering(decode)) == (which == "decode")
        await running.settled()


async def test_an_error_that_names_a_worker_is_passed_on_without_its_words(tmp_path: Path) -> None:
    async with pools(tmp_path, both=1) as (running, _, both):
        body = json.dumps({"error": {"message": f"bad request to {both[0].url}"}}).encode()
        both[0].usual = Act(status=422, body=body)
        assert is_error(await running.complete(), 422)["message"] == "bad request"


@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_everywhere_is_passed_on_with_its_retry_after(
    tmp_path: Path, status: int
) -> None:
    async with pools(tmp_path, prefill=2) as (running, prefill, decode):
        for engine in prefill:
            engine.usual = Act(status=status, headers={"Retry-After": "17"})
        answer = await running.complete()
        assert is_error(answer, status)["code"] == "engine_busy"
        assert answer.headers["retry-after"] == "17"
        assert decode[0].legs == []
        await running.settled()


async def test_twenty_bad_requests_leave_the_next_good_one_unharmed(tmp_path: Path) -> None:
    async with pools(tmp_path, both=1) as (running, _, both):
        both[0].script = [Act(status=400, body=b"{}") for _ in range(20)]
        for _ in range(20):
            is_error(await running.complete(), 400)
        assert (await running.complete()).status_code == 200


async def test_an_instance_that_keeps_failing_is_left_alone_and_tried_again_later(tmp_path: Path) -> None:
    async with pools(tmp_path, both=2) as (running, _, both):
        both[0].usual = Act(status=500)
        for _ in range(40):
            assert (await running.complete()).status_code == 200
        failed = len(both[0].legs)
        assert failed < 15
        both[0].usual = Act()
        async with asyncio.timeout(10):
            while len(both[0].legs) < failed + 3:
                assert (await running.complete()).status_code == 200
                await asyncio.sleep(0.02)


async def test_without_an_instance_the_answer_is_503_with_retry_after(tmp_path: Path) -> None:
    async with gateway(tmp_path, []) as running:
        answer = await running.complete()
        assert is_error(answer, 503)["code"] == "no_instance"
        assert int(answer.headers["retry-after"]) >= 1


async def test_killing_the_only_engine_gives_an_error_and_its_return_gives_answers(tmp_path: Path) -> None:
    async with pools(tmp_path, both=1) as (running, _, both):
        await running.complete()
        epoch = running.scheduler.services.roster.members["b0"].instance.epoch
        await both[0].kill()
        is_error(await running.complete(), 502)
        member = running.scheduler.services.roster.members["b0"]
        await until(lambda: not member.reachable)
        is_error(await running.complete(), 503)
        await both[0].start()
        await until(lambda: member.reachable)
        assert (await running.complete()).status_code == 200
        assert member.instance.epoch > epoch
        await running.settled()


async def test_a_dead_idle_connection_costs_nothing(tmp_path: Path) -> None:
    async with pools(tmp_path, both=1) as (running, _, both):
        await running.complete()
        await both[0].kill()
        await both[0].start()
        assert (await running.complete()).status_code == 200
        assert running.scheduler.services.metrics.setbacks == {}


async def test_every_endpoint_reserves_and_releases(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pools(tmp_path) as (running, _, decode):
        decode[0].usual = Act(hold=hold)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        sent = [
            asyncio.ensure_future(running.complete()),
            asyncio.ensure_future(running.complete(stream=True)),
            asyncio.ensure_future(running.complete(n=2)),
            asyncio.ensure_future(running.client.post("/v1/chat/completions", json=chat)),
            asyncio.ensure_future(running.client.post("/v1/chat/completions", json=chat | {"stream": True})),
        ]
        await decode[0].leg(5)
        assert running.reserved == 5
        hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * 5
        await running.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_whose_staged_kv_died_with_its_prefill_is_placed_anew_at_once(
    tmp_path: Path, stream: bool
) -> None:
    """The decode hangs, as a real one does; only the prefill's own end tells that it waits in vain."""
    async with pools(tmp_path, prefill=2, first_token_timeout_s=60.0) as (running, prefill, decode):
        decode[0].script = [Act(stall=True)]
        asked = asyncio.create_task(running.complete(stream=stream))
        await until(lambda: len(decode[0].legs) == 1)
        (source,) = [engine for engine in prefill if engine.legs]
        await source.kill()
        answer = await asyncio.wait_for(asked, 15)
        assert answer.status_code == 200
        assert [len(engine.legs) for engine in prefill] == [1, 1]
        assert len(decode[0].legs) == 2
        await running.settled()


async def test_a_stream_that_has_begun_goes_on_without_the_prefill_that_died(tmp_path: Path) -> None:
    async with pools(tmp_path) as (running, prefill, decode):
        decode[0].script = [Act(tokens=4, gap_s=0.5)]
        asked = asyncio.create_task(running.stream())
        await until(lambda: len(decode[0].legs) == 1)
        roster = running.scheduler.services.roster
        await until(lambda: not roster.members["p0"].awaited)
        await prefill[0].kill()
        roster.lost(roster.members["p0"])
        assert (await asked).rstrip().endswith("data: [DONE]")
        assert len(decode[0].legs) == 1
        await running.settled()


@pytest.mark.parametrize("leaves", ["prefill", "decode"])
async def test_an_instance_that_leaves_while_its_place_is_taken_is_replaced_by_another(
    tmp_path: Path, leaves: str
) -> None:
    async with pools(tmp_path, prefill=2, decode=2) as (running, prefill, decode):
        services = running.scheduler.services
        place, gone = services.placer.place, []

        async def place_then_leave(*args: Any, **named: Any) -> Any:
            placement, world = await place(*args, **named)
            if not gone:
                gone.append(getattr(placement, leaves).id)
                listed = [e.instance() for e in (*prefill, *decode) if e.name not in gone]
                write_instances(tmp_path / "instances.json", listed)
                await services.roster.refresh()
                assert gone[0] not in services.roster.members
            return placement, world

        services.placer.place = place_then_leave
        assert (await running.complete()).status_code == 200
        (left,) = (engine for engine in (*prefill, *decode) if engine.name in gone)
        assert left.legs == []
        await running.settled()


async def test_however_many_engines_cannot_be_reached_one_that_can_serves_the_request(tmp_path: Path) -> None:
    """They never saw it: trying the next one costs nothing, so no bound on retries holds it back."""
    gone = [ScriptedEngine(f"gone-{number}") for number in range(6)]
    there = ScriptedEngine("there")
    async with engines(there, *gone):
        for engine in gone:
            await engine.kill()
        listed = [engine.instance() for engine in (*gone, there)]
        async with gateway(tmp_path, listed, routing={"policy": "round-robin"}) as running:
            for _ in range(7):
                assert (await running.complete()).status_code == 200
            assert len(there.legs) == 7
            await running.settled()


async def test_a_stream_that_its_engine_ends_with_an_error_is_not_counted_as_served(tmp_path: Path) -> None:
    event = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
    async with pools(tmp_path) as (running, _, decode):
        decode[0].script = [Act(last_event=event)]
        text = await running.stream()
        assert text.endswith(event.decode() + "data: [DONE]\n\n")
        assert text.count("[DONE]") == 1
        await running.settled()
        services = running.scheduler.services
        assert services.metrics.outcomes == {"broken": 1}
        assert services.roster.members[decode[0].name].breaker.faults == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_requests_own_deadline_is_no_fault_of_its_engine_and_its_kv_is_taken_still(
    tmp_path: Path, stream: bool
) -> None:
    async with pools(tmp_path, request_timeout_s=0.4, first_token_timeout_s=20) as (running, _, decode):
        hold = asyncio.Event()
        decode[0].usual = Act(hold=hold)
        assert is_error(await running.complete(stream=stream), 504)["code"] == "deadline"
        taking = await decode[0].leg()
        assert not taking.aborted.is_set(), "aborted now, it would leave the KV staged"
        hold.set()
        await until(lambda: taking.finished.is_set() or taking.aborted.is_set())
        await running.settled()
        services = running.scheduler.services
        assert services.metrics.setbacks == {}
        assert [member.breaker.faults for member in services.roster.members.values()] == [0, 0]
        decode[0].usual = Act()
        assert (await running.complete(stream=stream)).status_code == 200


async def test_a_stream_that_goes_on_is_not_ended_by_the_requests_own_deadline(tmp_path: Path) -> None:
    async with pools(tmp_path, request_timeout_s=0.3) as (running, _, decode):
        decode[0].usual = Act(gap_s=0.05)
        text = await running.stream(max_tokens=12)
        assert "error" not in text
        assert text.endswith("data: [DONE]\n\n")


async def test_an_instance_whose_address_is_none_keeps_nobody_else_out(tmp_path: Path) -> None:
    one, other = ScriptedEngine("a"), ScriptedEngine("b")
    async with engines(one, other), gateway(tmp_path, [one.instance()]) as running:
        file = tmp_path / "instances.json"
        write_instances(file, [one.instance(url="http://[::1"), other.instance(url="http://x:99999")])
        await until(lambda: not running.scheduler.services.roster.members)
        write_instances(file, [one.instance(url="no address"), other.instance()])
        await until(lambda: "b" in running.scheduler.services.roster.members)
        assert (await running.complete()).status_code == 200
        assert one.legs == []


async def test_a_prefill_without_a_bootstrap_server_is_an_engines_failure_not_the_gateways(
    tmp_path: Path,
) -> None:
    prefill, decode = ScriptedEngine("p", Role.PREFILL, MOONCAKE), ScriptedEngine("d", Role.DECODE, MOONCAKE)
    async with (
        engines(prefill, decode),
        gateway(tmp_path, [prefill.instance(bootstrap_url=""), decode.instance()]) as running,
    ):
        assert (await running.complete()).status_code == 200
        assert prefill.legs == []
        assert "kv_transfer_params" not in decode.legs[0].body
        await running.settled()


async def test_an_instance_that_left_and_came_back_meanwhile_owes_no_flows(tmp_path: Path) -> None:
    async with pools(tmp_path, prefill=1) as (running, prefill, _):
        hold = asyncio.Event()
        prefill[0].usual = Act(hold=hold)
        roster = running.scheduler.services.roster
        sending = Sending(running.scheduler.services, None, Placed)  # type: ignore[arg-type]
        before = roster.members[prefill[0].name]
        sending._count_fetch(before, "store", 1)
        roster.members[prefill[0].name] = after = Member(before.instance, before.upstream)
        sending._count_fetch(before, "store", -1)
        assert (before.inbound_flows, after.inbound_flows, roster.source_flows["store"]) == (0, 0, 0)


class Placed:
    fetch_tokens = 1
