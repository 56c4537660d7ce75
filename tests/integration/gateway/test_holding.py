"""Prefilled requests that wait for a place to decode: in one scheduler, and in two on one Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_core.ledger import Limits, RefusalReason, Reservation
from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_core.registry.redis import RedisRegistry
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.redis import RedisServer
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.scripted_pools import is_error
from mooncake_testing.simulated import Simulated
from mooncake_testing.waiting import until

MOONCAKE = "MooncakeConnector"
PROFILE = "llama3-70b-8xa800"
LONG: dict[str, Any] = {"stream": True, "max_tokens": 500}


def decoder(name: str) -> ScriptedEngine:
    return ScriptedEngine(name, Role.DECODE, MOONCAKE)


@asynccontextmanager
async def pool(
    folder: Path,
    decoders: Sequence[ScriptedEngine],
    *,
    places: int = 1,
    ttft_s: float = 600.0,
    **more: Any,
) -> AsyncIterator[tuple[Gateway, ScriptedEngine]]:
    """A prefill engine, and decode engines with so many places each."""
    prefill = ScriptedEngine("p", Role.PREFILL, MOONCAKE)
    settings = {"profile": PROFILE, "slo": {"ttft_s": ttft_s}, "admission": {"mode": "predictive"}}
    settings.update(more)
    async with engines(prefill, *decoders):
        instances = [prefill.instance(), *[each.instance(max_batch=places) for each in decoders]]
        async with gateway(folder, instances, **settings) as running:
            yield running, prefill


def holding(running: Gateway) -> int:
    return len(running.scheduler.services.holding)


async def test_a_prefilled_request_waits_until_decode_has_a_place_and_is_then_served(tmp_path: Path) -> None:
    hold, decode = asyncio.Event(), decoder("d")
    async with pool(tmp_path, [decode]) as (running, prefill):
        decode.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(**LONG))
        await decode.leg()
        second = asyncio.ensure_future(running.complete(**LONG))
        await until(lambda: holding(running) == 1)
        assert len(prefill.legs) == 2
        assert len(decode.legs) == 1
        assert "mooncake_decode_wait_requests 1.0" in (await running.client.get("/metrics")).text
        hold.set()
        answers = [await first, await second]
        assert [each.status_code for each in answers] == [200, 200]
        assert decode.legs[1].kv["transfer_id"] == prefill.legs[1].kv["transfer_id"]
        await running.settled()
        metrics = (await running.client.get("/metrics")).text
        assert "mooncake_decode_wait_requests 0.0" in metrics
        assert "mooncake_decode_wait_seconds_count 2.0" in metrics
        assert 'mooncake_output_error_tokens_bucket{le="+Inf"} 2.0' in metrics
        decision = running.scheduler.services.decisions.get(answers[1].headers["x-request-id"])
        assert decision is not None
        assert decision.decode_wait_s
        assert decision.decode_wait_s > 0


async def test_where_there_is_plenty_nobody_asks_for_a_place(tmp_path: Path) -> None:
    decode = decoder("d")
    async with pool(tmp_path, [decode], places=64) as (running, _):
        answer = await running.complete(**LONG)
        assert answer.status_code == 200
        await running.settled()
        assert "mooncake_decode_wait_seconds_count 0.0" in (await running.client.get("/metrics")).text
        decision = running.scheduler.services.decisions.get(answer.headers["x-request-id"])
        assert decision is not None
        assert decision.decode_wait_s is None


async def test_who_finds_no_place_while_its_time_lasts_is_told_why_and_its_kv_is_freed(
    tmp_path: Path,
) -> None:
    hold, decode = asyncio.Event(), decoder("d")
    async with pool(tmp_path, [decode], ttft_s=2.0) as (running, prefill):
        decode.usual = Act(hold=hold)
        # Predicted to be short, it is not over when it should be.
        first = asyncio.ensure_future(running.complete(stream=True, max_tokens=2))
        await decode.leg()
        refused = await running.complete(**LONG)
        error = is_error(refused, 429)
        assert error["code"] == "tbt"
        assert error["predicted"]["ttft_s"] >= 2.0
        assert int(refused.headers["retry-after"]) >= 1
        freeing = (await decode.leg(2)).body
        assert freeing["max_tokens"] == 1
        assert freeing["kv_transfer_params"]["transfer_id"] == prefill.legs[1].kv["transfer_id"]
        hold.set()
        assert (await first).status_code == 200
        await running.settled()
        services = running.scheduler.services
        assert services.metrics.wasted_prefills == 1
        decision = services.decisions.get(refused.headers["x-request-id"])
        assert decision is not None
        assert decision.refused is RefusalReason.TBT
        assert decision.decode_wait_s is not None
        assert decision.decode_wait_s > 0


async def test_who_waits_until_its_own_deadline_is_told_so_and_its_kv_is_freed(tmp_path: Path) -> None:
    decode = decoder("d")
    # Freeing takes longer than is left of the request's time: nobody waits for it any more.
    decode.usual = Act(wait_s=0.5)
    async with pool(tmp_path, [decode], request_timeout_s=1.0) as (running, prefill):
        services = running.scheduler.services
        now_s = services.clock.now_s()
        place = Reservation("another's", None, 0.0, "d", 100, now_s, now_s + 1)
        await services.ledger.reserve(place, Limits(), now_s)
        services.ledger.prefill_finished(place.id, now_s)
        late = await running.complete(**LONG)
        assert is_error(late, 504)["code"] == "deadline"
        freeing = await decode.leg()
        assert freeing.body["max_tokens"] == 1
        assert freeing.kv["transfer_id"] == prefill.legs[0].kv["transfer_id"]
        await until(lambda: freeing.finished.is_set() or freeing.aborted.is_set())
        assert not freeing.aborted.is_set()
        assert holding(running) == 0
        services.ledger.release(place.id, services.clock.now_s())
        await running.settled()


async def test_a_client_that_leaves_while_it_waits_gives_its_kv_back_and_takes_no_place(
    tmp_path: Path,
) -> None:
    hold, decode = asyncio.Event(), decoder("d")
    async with pool(tmp_path, [decode]) as (running, prefill):
        decode.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(**LONG))
        await decode.leg()
        second = asyncio.ensure_future(running.complete(**LONG))
        await until(lambda: holding(running) == 1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await until(lambda: holding(running) == 0)
        freeing = (await decode.leg(2)).body
        assert freeing["max_tokens"] == 1
        assert freeing["kv_transfer_params"]["transfer_id"] == prefill.legs[1].kv["transfer_id"]
        hold.set()
        assert (await first).status_code == 200
        await running.settled()
        assert running.scheduler.services.metrics.cancellations["prefilling"] == 1


async def test_decode_is_chosen_when_there_is_a_place_not_at_the_arrival(tmp_path: Path) -> None:
    one, two = asyncio.Event(), asyncio.Event()
    decoders = [decoder("d1"), decoder("d2")]
    async with pool(tmp_path, decoders) as (running, _):
        holds = dict(zip(("d1", "d2"), (one, two), strict=True))
        for each in decoders:
            each.usual = Act(hold=holds[each.name])
        firsts = [asyncio.ensure_future(running.complete(**LONG)) for _ in decoders]
        await asyncio.gather(*[each.leg() for each in decoders])
        third = asyncio.ensure_future(running.complete(**LONG))
        await until(lambda: holding(running) == 1)
        decision = running.scheduler.datapath.flows
        assert decision
        # Whichever it was promised to, the other one ends first.
        services = running.scheduler.services
        loads = services.ledger.loads(services.clock.now_s())
        promised = next(name for name in holds if loads[name].arriving)
        other = next(each for each in decoders if each.name != promised)
        holds[other.name].set()
        answer = await third
        assert answer.status_code == 200
        assert len(other.legs) == 2
        holds[promised].set()
        await asyncio.gather(*firsts)
        latest = services.decisions.get(answer.headers["x-request-id"])
        assert latest is not None
        assert latest.placement is not None
        assert latest.placement.decode.id == other.name
        await running.settled()


async def test_the_death_of_its_prefill_engine_ends_the_wait_and_it_is_placed_anew(tmp_path: Path) -> None:
    hold, decode = asyncio.Event(), decoder("d")
    async with pool(tmp_path, [decode]) as (running, _):
        decode.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(**LONG))
        await decode.leg()
        second = asyncio.ensure_future(running.complete(**LONG))
        await until(lambda: holding(running) == 1)
        roster = running.scheduler.services.roster
        roster.lost(roster.members["p"])
        await until(lambda: holding(running) == 0)
        hold.set()
        for each in (first, second):
            assert (await each).status_code in (200, 502, 503)
        await running.settled()


# -- two schedulers


@asynccontextmanager
async def two_schedulers(
    folder: Path, redis: RedisServer, *instances: Instance, **settings: Any
) -> AsyncIterator[list[Gateway]]:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 - one folder of a test
    namespace = f"holding-{folder.name}"
    registry = RedisRegistry(redis.url, namespace=namespace)
    registered = [await registry.register(instance) for instance in instances]

    async def beat() -> None:
        while True:
            for each in registered:
                await registry.heartbeat(each.id, each.epoch)
            await asyncio.sleep(0.3)

    beating = asyncio.create_task(beat())
    settings = {
        "instances_file": None, "redis_url": redis.url, "namespace": namespace, "profile": PROFILE,
        "slo": {"ttft_s": 600.0}, "admission": {"mode": "predictive"},
    } | settings  # fmt: skip
    for name in ("one", "two"):
        (folder / name).mkdir()
    try:
        async with (
            gateway(folder / "one", [], **settings) as one,
            gateway(folder / "two", [], **settings) as two,
        ):
            for each in (one, two):
                await until(lambda each=each: not each.scheduler.why_not_ready())  # type: ignore[misc]
            yield [one, two]
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await registry.close()


@pytest.mark.parametrize("places", [1, 3])
async def test_two_schedulers_never_both_take_the_last_place_and_serve_all_that_wait(
    tmp_path: Path, redis_server: RedisServer, places: int
) -> None:
    decode, prefill = decoder("d"), ScriptedEngine("p", Role.PREFILL, MOONCAKE)
    hold = asyncio.Event()
    decode.usual = Act(hold=hold)
    most = 0

    def running_now() -> int:
        nonlocal most
        now = sum(not leg.finished.is_set() for leg in decode.legs)
        most = max(most, now)
        return now

    async with (
        engines(prefill, decode),
        two_schedulers(tmp_path, redis_server, prefill.instance(), decode.instance(max_batch=places)) as both,
    ):
        sent = [asyncio.ensure_future(both[at % 2].complete(**LONG)) for at in range(12)]
        await until(lambda: sum(map(holding, both)) == 12 - places)
        await until(lambda: running_now() == places)
        assert all(map(holding, both))
        hold.set()

        async def watch() -> None:
            while True:
                running_now()
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        answers: list[httpx.Response] = await asyncio.gather(*sent)
        watching.cancel()
        assert [each.status_code for each in answers] == [200] * 12
        assert most == places
        assert len(decode.legs) == 12
        for each in both:
            await until(lambda each=each: each.reserved == 0)  # type: ignore[misc]


SCALE = 20.0
_DECODING = """
local count = 0
for _, row in ipairs(redis.call('KEYS', '*ledger:row:*')) do
  count = count + tonumber(redis.call('HGET', row, 's:decode') or 0)
end
return count
"""


def decoding(redis: RedisServer) -> int:
    """What all schedulers have given places to at one moment; a picture of the others is late."""
    with redis.client() as client:
        return int(client.eval(_DECODING, 0))


async def test_decode_that_is_full_serves_more_by_waiting_than_by_looking_once_and_frees_all_kv(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Simulated engines, two schedulers: 40 answers of some seconds at once, and 4 fit at a time."""
    served: dict[str, int] = {}
    waited: dict[str, float] = {}
    connector = {"kv_connector": MOONCAKE, "kv_role": "kv_both"}
    with Simulated(time_scale=SCALE) as simulated:
        processes = {role: simulated.engine(connector=connector) for role in (Role.PREFILL, Role.DECODE)}
        instances = [
            Instance(
                id=role.value, role=role, url=each.url, model="tiny", pool=role.value, revision="1",
                engine=EngineKind.SIMULATED, engine_version="1", connector=MOONCAKE,
                bootstrap_url=each.bootstrap_url, block_size_tokens=16, max_batch=4,
                kv_capacity_tokens=1_400_000,
            )
            for role, each in processes.items()
        ]  # fmt: skip
        for mode in ("none", "predictive"):
            settings = {"time_scale": SCALE, "slo": {"ttft_s": 30.0}, "admission": {"mode": mode}}
            async with two_schedulers(tmp_path / mode, redis_server, *instances, **settings) as both:
                for each in both:
                    # The pair learns of each other.
                    assert (await each.complete(stream=True)).status_code == 200
                prompts = [[100_000 + at, *range(1_000, 1_600)] for at in range(40)]
                sent = [
                    asyncio.ensure_future(both[at % 2].complete(stream=True, max_tokens=240, prompt=prompt))
                    for at, prompt in enumerate(prompts)
                ]
                most = 0
                while not all(each.done() for each in sent):
                    most = max(most, decoding(redis_server))
                    await asyncio.sleep(0.05)
                answers = await asyncio.gather(*sent)
                statuses = Counter(each.status_code for each in answers)
                assert set(statuses) <= {200, 429}
                assert all("[DONE]" in each.text for each in answers if each.status_code == 200)
                if mode == "predictive":
                    assert most <= 4
                served[mode] = statuses[200]
                waited[mode] = sum(each.scheduler.services.metrics.decode_wait_s.total for each in both)
                for each in both:
                    await until(lambda each=each: not each.scheduler.datapath.flows)  # type: ignore[misc]
                    await until(lambda each=each: each.reserved == 0)  # type: ignore[misc]
                for process in processes.values():
                    await until(lambda process=process: process.metric("vllm:kv_cache_usage_perc") == 0)  # type: ignore[misc]
    assert waited["none"] == 0 < waited["predictive"]
    assert served["predictive"] > served["none"]


async def test_kv_that_one_decode_did_not_take_waits_for_a_place_at_another_like_any_other(
    tmp_path: Path,
) -> None:
    hold, decodes = asyncio.Event(), [decoder("d0"), decoder("d1")]
    async with pool(tmp_path, decodes) as (running, prefill):
        decodes[0].usual = decodes[1].usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(**LONG))
        await until(lambda: sum(len(each.legs) for each in decodes) == 1)
        busy, other = decodes if decodes[0].legs else reversed(decodes)
        other.script = [Act(status=503)]
        second = asyncio.ensure_future(running.complete(**LONG))
        await other.leg()
        await until(lambda: holding(running) == 1)
        # The one that refused is not asked again, and the other one has no second place.
        await asyncio.sleep(0.2)
        assert (len(busy.legs), len(other.legs), len(prefill.legs)) == (1, 1, 2)
        hold.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        assert (len(busy.legs), len(other.legs), len(prefill.legs)) == (2, 1, 2)
        assert busy.legs[1].kv["transfer_id"] == prefill.legs[1].kv["transfer_id"]
        await running.settled()
