"""Prefills wait in the scheduler for their turn: short ones first, also between schedulers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_core.ledger import Limits, Reservation
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_core.registry import Role
from mooncake_scheduler.admin.views import decision_view
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import Ask
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.gateway import turns
from mooncake_scheduler.gateway.breaker import THRESHOLD
from mooncake_testing.gateway import Gateway, gateway, write_instances
from mooncake_testing.raw_client import RawClient
from mooncake_testing.redis import RedisServer
from mooncake_testing.scheduler_process import NAMESPACE, SchedulerProcess, announced
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.scripted_pools import MOONCAKE, pair, pools
from mooncake_testing.waiting import until

SLOW: dict[str, Any] = {"profile": "llama3-70b-8xa800", "time_scale": 0.01}
"""Model time goes slowly: what is predicted to take a second is not over when a slow machine looks again."""

PREDICTIVE = {"mode": "predictive"}


def a_prompt(tokens: int, first: int = 0) -> list[int]:
    return [first, *range(tokens - 1)]


def held(one: Gateway) -> int:
    """Requests that wait for their turn in a scheduler."""
    waits = one.scheduler.services.turns
    assert waits is not None
    return waits.held


def prefilled(engine: ScriptedEngine) -> list[int]:
    """Prompt tokens of the legs that came, in order."""
    return [len(leg.body["prompt"]) for leg in engine.legs]


async def keep_busy(
    one: Gateway, prefills: Sequence[ScriptedEngine], tokens: Sequence[int] = (9_000, 9_000)
) -> tuple[list[asyncio.Event], list[asyncio.Future[httpx.Response]]]:
    """Let each instance compute a prompt until its event is set; the events and the answers."""
    hold = [asyncio.Event() for _ in prefills]
    for engine, event in zip(prefills, hold, strict=True):
        engine.usual = Act(hold=event)
    busy = [asyncio.ensure_future(one.complete(prompt=a_prompt(n, at))) for at, n in enumerate(tokens)]
    for engine in prefills:
        await engine.leg()
    return hold, busy


async def ask(one: Gateway, tokens: int, **fields: Any) -> asyncio.Future[httpx.Response]:
    """Send a prompt that has to wait; returns when it does."""
    before = held(one)
    answer = asyncio.ensure_future(one.complete(prompt=a_prompt(tokens, tokens), **fields))
    await until(lambda: held(one) == before + 1)
    return answer


async def statuses(*asked: asyncio.Future[httpx.Response]) -> list[int]:
    return [answer.status_code for answer in await asyncio.gather(*asked)]


async def test_while_an_instance_computes_prompts_wait_in_the_scheduler_and_the_shortest_goes_next(
    tmp_path: Path,
) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path, **SLOW) as (running, prefill, _):
        prefill.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(prompt=a_prompt(9_000)))
        await prefill.leg()
        waiting = [await ask(running, tokens) for tokens in (8_000, 2_000, 4_000)]
        assert len(prefill.legs) == 1
        view = (await running.client.get("/metrics")).text
        assert "mooncake_prefill_held_seconds_count 0.0" in view
        hold.set()
        assert await statuses(first, *waiting) == [200] * 4
        assert prefilled(prefill) == [9_000, 2_000, 4_000, 8_000]
        await running.settled()
        assert "mooncake_prefill_held_seconds_count 3.0" in (await running.client.get("/metrics")).text
        decisions = running.scheduler.services.decisions.latest(4)
        by_tokens = {decision_view(each)["ask"]["prompt_tokens"]: decision_view(each) for each in decisions}
        assert by_tokens[9_000]["held_s"] is None, "an idle instance takes it at once"
        assert 0 < by_tokens[2_000]["held_s"] <= by_tokens[8_000]["held_s"]


async def test_an_idle_instance_is_not_waited_for(tmp_path: Path) -> None:
    async with pair(tmp_path, **SLOW) as (running, prefill, _):
        for number in range(3):
            assert (await running.complete(prompt=a_prompt(2_000, number))).status_code == 200
        assert len(prefill.legs) == 3
        assert all(each.held_s is None for each in running.scheduler.services.decisions.latest(3))


@pytest.mark.parametrize(
    "settings",
    [
        {"routing": {"policy": "kv-centric", "queue_order": "first-come"}},
        {"routing": {"policy": "algorithm-1"}},
        {"profile": None},
    ],
    ids=["first-come", "algorithm-1", "nothing is known of the engines"],
)
async def test_without_an_order_engines_take_prompts_as_they_come(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path, **{**SLOW, **settings}) as (running, prefill, _):
        prefill.usual = Act(hold=hold)
        asked = []
        for number, tokens in enumerate((8_000, 2_000, 4_000)):
            asked.append(asyncio.ensure_future(running.complete(prompt=a_prompt(tokens))))
            await prefill.leg(number + 1)
        hold.set()
        assert await statuses(*asked) == [200] * 3


async def test_who_leaves_while_it_waits_never_reaches_the_engine_and_holds_nobody_up(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path, **SLOW) as (running, prefill, _):
        prefill.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(prompt=a_prompt(9_000)))
        await prefill.leg()
        leaving = await RawClient.ask(running.port, prompt=a_prompt(1_000))
        await until(lambda: held(running) == 1)
        other = await ask(running, 4_000)
        leaving.leave()
        await until(lambda: held(running) == 1)
        hold.set()
        assert await statuses(first, other) == [200] * 2
        assert prefilled(prefill) == [9_000, 4_000]
        await running.settled()
        assert running.scheduler.services.metrics.cancellations == {"reserved": 1}


async def test_a_wait_that_takes_too_long_ends_in_a_504(tmp_path: Path) -> None:
    async with pair(tmp_path, prefill_timeout_s=0.3, **SLOW) as (running, prefill, _):
        services = running.scheduler.services
        now_s = services.clock.now_s()
        busy = Reservation("other", "p", 900.0, "d", 1, now_s + 900, now_s + 901)
        assert await services.ledger.reserve(busy, Limits(), now_s) is None
        answer = await running.complete(prompt=a_prompt(2_000))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert prefill.legs == []
        services.ledger.release("other", now_s)
        await running.settled()


async def test_those_who_wait_at_an_instance_that_leaves_are_placed_anew_and_it_is_no_retry(
    tmp_path: Path,
) -> None:
    hold = asyncio.Event()
    async with pools(tmp_path, prefill=2, **SLOW) as (running, (gone, left), decodes):
        gone.usual = left.usual = Act(hold=hold)
        busy = [asyncio.ensure_future(running.complete(prompt=a_prompt(9_000, n))) for n in range(2)]
        await gone.leg()
        await left.leg()
        waiting = [await ask(running, tokens) for tokens in (1_000, 2_000, 3_000, 4_000)]
        budget = running.scheduler.services.budget
        before = budget._left
        write_instances(tmp_path / "instances.json", [each.instance() for each in (left, *decodes)])
        await until(lambda: len(running.scheduler.services.roster.members) == 2)
        setbacks = running.scheduler.services.metrics.setbacks
        await until(lambda: setbacks["gone", "place_anew"] > 0)
        await until(lambda: held(running) == 4)
        assert budget._left == before
        hold.set()
        assert await statuses(*waiting) == [200] * 4
        assert prefilled(left)[1:] == [1_000, 2_000, 3_000, 4_000]
        await asyncio.gather(*busy)
        await running.settled()


async def test_a_long_line_at_an_instance_that_leaves_goes_on_whole(tmp_path: Path) -> None:
    hold, many = asyncio.Event(), 120
    async with AsyncExitStack() as stack:
        running, (gone, left), decodes = await stack.enter_async_context(pools(tmp_path, prefill=2, **SLOW))
        gone.usual = left.usual = Act(hold=hold)
        busy = [asyncio.ensure_future(running.complete(prompt=a_prompt(9_000, n))) for n in range(2)]
        await gone.leg()
        await left.leg()
        # A client of its own: others keep to a hundred connections.
        running.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=running.url, timeout=60, limits=httpx.Limits(max_connections=None))
        )
        waiting = [asyncio.ensure_future(running.complete(prompt=a_prompt(600, n))) for n in range(many)]
        await until(lambda: held(running) == many)
        write_instances(tmp_path / "instances.json", [each.instance() for each in (left, *decodes)])
        await until(lambda: running.scheduler.services.metrics.setbacks["gone", "place_anew"] > many // 4)
        await until(lambda: held(running) == many)
        hold.set()
        assert set(await statuses(*busy, *waiting)) == {200}
        await running.settled()


async def test_those_who_wait_are_computed_by_another_instance_that_has_nothing_to_do(tmp_path: Path) -> None:
    async with pools(tmp_path, prefill=2, **SLOW) as (running, prefills, _):
        hold, busy = await keep_busy(running, prefills)
        waiting = [await ask(running, tokens) for tokens in (1_000, 2_000, 3_000, 4_000)]
        ledger, clock = running.scheduler.services.ledger, running.scheduler.services.clock
        stuck = len(ledger.load(prefills[0].name, clock.now_s()).waiting)
        assert 0 < stuck < 4
        hold[1].set()
        assert await statuses(*waiting) == [200] * 4
        assert len(prefills[0].legs) == 1
        assert sorted(prefilled(prefills[1])) == [1_000, 2_000, 3_000, 4_000, 9_000]
        hold[0].set()
        assert await statuses(*busy) == [200] * 2
        await running.settled()
        page = (await running.client.get("/metrics")).text
        assert f"mooncake_prefill_moves_total {stuck}.0" in page
        views = [decision_view(each) for each in running.scheduler.services.decisions.latest(6)]
        assert sum(view["moves"] for view in views) == stuck
        assert ledger.load(prefills[0].name, clock.now_s()).queued == 0


async def test_nobody_is_moved_to_an_instance_that_overruns_what_was_predicted(tmp_path: Path) -> None:
    async with pools(tmp_path, prefill=2, **SLOW) as (running, prefills, _):
        # The short one is over in a second and a half, by its prediction.
        hold, busy = await keep_busy(running, prefills, (9_000, 100))
        quick = next(engine for engine in prefills if prefilled(engine) == [100])
        services = running.scheduler.services
        await until(lambda: services.ledger.load(quick.name, services.clock.now_s()).queued_s == 0)
        waiting = [asyncio.ensure_future(running.complete(prompt=a_prompt(5_000, n))) for n in range(4)]
        await until(lambda: held(running) >= 2)
        assert services.metrics.moves == 0
        for event in hold:
            event.set()
        assert await statuses(*busy, *waiting) == [200] * 6


async def test_an_instance_whose_breaker_lets_somebody_try_again_may_be_waited_for(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path, **SLOW) as (running, prefill, _):
        prefill.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(prompt=a_prompt(9_000)))
        await prefill.leg()
        roster = running.scheduler.services.roster
        member = roster.members[prefill.name]
        for _ in range(THRESHOLD):
            roster.faulted(member)
        assert not member.breaker.admits(time.monotonic())
        await until(lambda: member.breaker.admits(time.monotonic()))
        second = await ask(running, 2_000)
        hold.set()
        assert await statuses(first, second) == [200, 200]


async def test_those_who_wait_at_an_instance_that_keeps_failing_are_placed_anew(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pools(tmp_path, prefill=2, **SLOW) as (running, (failing, well), _):
        failing.usual = well.usual = Act(hold=hold)
        busy = [asyncio.ensure_future(running.complete(prompt=a_prompt(9_000, n))) for n in range(2)]
        await failing.leg()
        await well.leg()
        waiting = [await ask(running, tokens) for tokens in range(1_000, 9_000, 500)]
        await failing.kill()
        hold.set()
        assert await statuses(*busy, *waiting) == [200] * 18
        await running.settled()


async def test_a_request_that_one_engine_serves_alone_lets_others_have_its_turn(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path, **SLOW) as (running, prefill, decode):
        prefill.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(prompt=a_prompt(9_000)))
        await prefill.leg()
        other = await ask(running, 4_000)
        # Scores of the prompt are asked for: decode has to compute it itself.
        whole = await running.complete(prompt=a_prompt(500), prompt_logprobs=1)
        assert whole.status_code == 200
        assert len(decode.legs) == 1
        hold.set()
        assert await statuses(first, other) == [200] * 2


# -- several schedulers


@asynccontextmanager
async def schedulers(
    folder: Path,
    redis: RedisServer,
    fleet: Sequence[ScriptedEngine],
    count: int = 2,
    each: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> AsyncIterator[list[Gateway]]:
    """Schedulers in this loop that share a Redis in which the fleet is announced."""
    settings = {"redis_url": redis.url, "namespace": NAMESPACE, **SLOW, **settings}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engines(*fleet))
        await stack.enter_async_context(announced(redis, [engine.instance() for engine in fleet]))
        running = [
            await stack.enter_async_context(gateway(folder, [], **settings, **own))
            for own in each or [{}] * count
        ]
        for one in running:
            await until(lambda one=one: len(one.scheduler.services.roster.members) == len(fleet))  # type: ignore[misc]
        yield running


def a_fleet() -> tuple[ScriptedEngine, ScriptedEngine]:
    return ScriptedEngine("p", Role.PREFILL, MOONCAKE), ScriptedEngine("d", Role.DECODE, MOONCAKE)


def queued(one: Gateway) -> int:
    """How many prefills a scheduler knows to be promised to the prefill instance."""
    services = one.scheduler.services
    return services.ledger.load("p", services.clock.now_s()).queued


def seen_waiting(one: Gateway) -> int:
    """How many a scheduler knows to wait at the prefill instance, its own and its peers'."""
    services = one.scheduler.services
    return len(services.ledger.load("p", services.clock.now_s()).waiting)


async def test_two_schedulers_take_turns_at_one_instance_in_one_order(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine a peer may be slow to hear of its turn; here nobody loses patience.
    monkeypatch.setattr(turns, "PATIENCE_S", inf)
    hold = asyncio.Event()
    prefill, decode = a_fleet()
    async with schedulers(tmp_path, redis_server, (prefill, decode)) as (one, two):
        prefill.usual = Act(hold=hold)
        first = asyncio.ensure_future(one.complete(prompt=a_prompt(9_000)))
        await prefill.leg()
        await until(lambda: queued(two) == 1)
        asked = []
        for number, tokens in enumerate((6_000, 3_000, 1_000, 5_000, 2_000, 4_000)):
            asked.append(await ask((one, two)[number % 2], tokens))
        for each in (one, two):
            await until(lambda each=each: seen_waiting(each) == 6)  # type: ignore[misc]
        assert len(prefill.legs) == 1
        hold.set()
        assert await statuses(first, *asked) == [200] * 7
        assert prefilled(prefill) == [9_000, 1_000, 2_000, 3_000, 4_000, 5_000, 6_000]
        for each in (one, two):
            await until(lambda each=each: seen_waiting(each) == 0)  # type: ignore[misc]


async def test_of_a_burst_at_several_schedulers_one_is_sent_and_the_others_wait(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine a mirror may be older than elsewhere.
    monkeypatch.setattr(turns, "MIRROR_S", 3.0)
    monkeypatch.setattr(turns, "PATIENCE_S", inf)
    hold = asyncio.Event()
    prefill, decode = a_fleet()
    async with schedulers(tmp_path, redis_server, (prefill, decode)) as (one, two):
        prefill.usual = Act(hold=hold)
        asked = [
            asyncio.ensure_future(each.complete(prompt=a_prompt(tokens, tokens)))
            for tokens in (5_000, 3_000, 4_000)
            for each in (one, two)
        ]
        # All look at an instance that is idle; only the ledger knows who came first.
        for each in (one, two):
            await until(lambda each=each: seen_waiting(each) == 5)  # type: ignore[misc]
        assert len(prefill.legs) == 1
        hold.set()
        assert await statuses(*asked) == [200] * 6
        sent = prefilled(prefill)
        assert sent[1:] == sorted(sent[1:])


async def test_two_schedulers_move_those_who_wait_and_each_is_computed_once(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    hold = [asyncio.Event(), asyncio.Event()]
    prefills = [ScriptedEngine(f"p{n}", Role.PREFILL, MOONCAKE) for n in range(2)]
    decode = ScriptedEngine("d", Role.DECODE, MOONCAKE)
    async with schedulers(tmp_path, redis_server, (*prefills, decode)) as both:
        for engine, event in zip(prefills, hold, strict=True):
            engine.usual = Act(hold=event)
        busy = []
        for one in both:
            busy.append(asyncio.ensure_future(one.complete(prompt=a_prompt(9_000))))
            await until(lambda: sum(len(engine.legs) for engine in prefills) == len(busy))
            for each in both:
                services = each.scheduler.services
                await until(
                    lambda services=services: (  # type: ignore[misc]
                        sum(load.queued for load in services.ledger.loads(services.clock.now_s()).values())
                        == len(busy)
                    )
                )
        asked = [await ask(both[n % 2], 1_000 + 500 * n) for n in range(8)]
        hold[1].set()
        assert await statuses(*asked) == [200] * 8
        assert len(prefills[0].legs) == 1
        assert sorted(prefilled(prefills[1])) == [*(1_000 + 500 * n for n in range(8)), 9_000]
        hold[0].set()
        assert await statuses(*busy) == [200] * 2
        assert sum(one.scheduler.services.metrics.moves for one in both) > 0
        for one in both:
            await until(lambda one=one: one.reserved == 0)  # type: ignore[misc]


async def test_while_redis_hangs_those_who_wait_stay_in_line_and_no_instance_stands_idle(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills = [ScriptedEngine(f"p{n}", Role.PREFILL, MOONCAKE) for n in range(2)]
    decode = ScriptedEngine("d", Role.DECODE, MOONCAKE)
    async with schedulers(tmp_path, redis_server, (*prefills, decode), count=1) as (one,):
        ledger, clock = one.scheduler.services.ledger, one.scheduler.services.clock
        hold, busy = await keep_busy(one, prefills)
        asked = [await ask(one, 1_000 + 10 * n) for n in range(20)]
        stuck = len(ledger.load("p0", clock.now_s()).waiting)
        assert stuck > 5
        move, under_way, most = ledger.move, 0, 0

        async def counted(*wanted: Any) -> bool:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                return await move(*wanted)
            finally:
                under_way -= 1

        monkeypatch.setattr(ledger, "move", counted)
        redis_server.pause()
        try:
            hold[1].set()
            # The other one takes those that wait for it, and runs out of work.
            await until(lambda: len(prefills[1].legs) == 21 - stuck)
            least = stuck
            ends_s = time.monotonic() + 1.5
            while time.monotonic() < ends_s:
                await asyncio.sleep(0.01)
                least = min(least, held(one))
            assert most <= 1
            assert least >= stuck - 1
            hold[0].set()
            await until(lambda: len(prefills[0].legs) == 1 + stuck, within_s=1.5)
        finally:
            redis_server.resume()
        assert await statuses(*busy, *asked) == [200] * 22


async def test_who_leaves_while_it_is_being_moved_is_released_where_it_is_then(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills = [ScriptedEngine(f"p{n}", Role.PREFILL, MOONCAKE) for n in range(2)]
    decode = ScriptedEngine("d", Role.DECODE, MOONCAKE)
    async with schedulers(tmp_path, redis_server, (*prefills, decode), count=1) as (one,):
        ledger, clock = one.scheduler.services.ledger, one.scheduler.services.clock
        hold, busy = await keep_busy(one, prefills)
        leaving = [await RawClient.ask(one.port, prompt=a_prompt(3_000, n)) for n in range(2)]
        await until(lambda: held(one) == 2)
        move, moving, go = ledger.move, asyncio.Event(), asyncio.Event()
        moved = []

        async def slow(*wanted: Any) -> bool:
            moving.set()
            await go.wait()
            moved.append(await move(*wanted))
            return moved[-1]

        monkeypatch.setattr(ledger, "move", slow)
        hold[1].set()
        await until(moving.is_set)
        for each in leaving:
            each.leave()
        await asyncio.sleep(0.2)
        assert one.reserved == 2, "the one that computes, and the one that is being moved"
        go.set()
        await until(lambda: one.reserved == 1)
        assert moved == [True]
        hold[0].set()
        assert await statuses(*busy) == [200] * 2
        await one.settled()
        assert all(load.queued == 0 for load in ledger.loads(clock.now_s()).values())
        # Nothing was unclear, or the table would have been posted again.
        assert ledger.posted == 1  # type: ignore[attr-defined]


async def test_of_two_that_are_placed_anew_at_once_only_as_many_are_promised_as_can_be_kept(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    cost_s = CostModel.from_profile(LLAMA3_70B_A800).prefill_s(9_000, 0)
    slo = {"ttft_s": 2.5 * cost_s}
    async with schedulers(tmp_path, redis_server, a_fleet(), slo=slo, admission=PREDICTIVE) as fleet:
        placers = [one.scheduler.services.placer for one in fleet]
        await placers[0].place(Ask("runs", 9_000, 4), {}, whole=False)
        for each in fleet:
            await until(lambda each=each: queued(each) == 1)  # type: ignore[misc]
        # Each sees room for one; there is none for both.
        placed = await asyncio.gather(
            *[
                each.place(Ask(f"anew-{number}", 9_000, 4), {}, whole=False, again=True)
                for number, each in enumerate(placers)
            ]
        )
        assert sorted(placement.promised_ttft_s < inf for placement, _ in placed) == [False, True]
        for each in fleet:
            await until(lambda each=each: seen_waiting(each) == 2)  # type: ignore[misc]
        ledger, now_s = placers[0].worlds.ledger, placers[0].clock.now_s()
        load = ledger.load("p", now_s)
        first, last = QueueOrder().sequence(load.waiting, now_s + load.handed_over_s)
        assert first.latest_end_s < last.latest_end_s == inf
        for placer, name in zip((placers[0], *placers), ("runs", "anew-0", "anew-1"), strict=True):
            placer.worlds.ledger.release(name, placer.clock.now_s())


@pytest.mark.parametrize("routing", [{"queue_order": "first-come"}, {"policy": "algorithm-1"}])
async def test_a_scheduler_that_takes_no_turns_goes_past_nobody_who_waits_for_one(
    tmp_path: Path, redis_server: RedisServer, routing: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a rolling change of routing: going past those that wait, it would starve them.
    monkeypatch.setattr(turns, "PATIENCE_S", inf)
    hold = asyncio.Event()
    fleet = a_fleet()
    prefill = fleet[0]
    prefill.usual = Act(hold=hold)
    own = {"routing": routing}
    async with schedulers(tmp_path, redis_server, fleet, each=({}, own)) as (ordered, first_come):
        sent = [asyncio.ensure_future(first_come.complete(prompt=a_prompt(9_000, n))) for n in range(3)]
        await prefill.leg(3)
        await until(lambda: queued(ordered) == 3)
        first = await ask(ordered, 4_000)
        await until(lambda: seen_waiting(first_come) == 1)
        later = [await ask(first_come, tokens) for tokens in (6_000, 5_000)]
        assert len(prefill.legs) == 3
        hold.set()
        assert await statuses(*sent, first, *later) == [200] * 6
        assert prefilled(prefill)[3:] == [4_000, 5_000, 6_000]
        # Nobody waits any more: again they are sent as they come.
        await until(lambda: seen_waiting(first_come) == queued(first_come) == 0)
        prefill.usual = Act(hold=(again := asyncio.Event()))
        sent = [asyncio.ensure_future(first_come.complete(prompt=a_prompt(9_000, n))) for n in (7, 8)]
        await prefill.leg(8)
        again.set()
        assert await statuses(*sent) == [200] * 2


async def test_when_a_scheduler_is_killed_whose_turn_it_is_the_others_go_on(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    hold = asyncio.Event()
    prefill, decode = a_fleet()
    killed = SchedulerProcess(tmp_path, redis_url=redis_server.url, **SLOW)
    try:
        async with schedulers(tmp_path, redis_server, (prefill, decode), count=1) as (one,):
            await killed.ready()
            prefill.usual = Act(hold=hold)
            first = asyncio.ensure_future(one.complete(prompt=a_prompt(9_000)))
            await prefill.leg()
            async with httpx.AsyncClient(base_url=killed.url, timeout=30) as client:
                services = one.scheduler.services

                async def hears_of_the_first() -> bool:
                    seen = await client.get(f"http://127.0.0.1:{killed.admin_port}/instances")
                    return any(each["load"]["queued"] == 1 for each in seen.json()["instances"])

                # Else it would take the instance for idle.
                await until(hears_of_the_first)
                # The shortest are those of the scheduler that dies.
                doomed = [
                    asyncio.ensure_future(
                        client.post(
                            "/v1/completions",
                            json={"model": "tiny", "prompt": a_prompt(500 + n), "max_tokens": 4},
                        )
                    )
                    for n in range(3)
                ]
                await until(lambda: seen_waiting(one) == 3)
                asked = [await ask(one, tokens) for tokens in (3_000, 2_000)]
                killed.kill()
                hold.set()
                assert await statuses(first, *asked) == [200] * 3
                # Their turns were passed over, or were theirs no longer: nobody can tell the two apart.
                assert prefilled(prefill) == [9_000, 2_000, 3_000]
                broken = await asyncio.gather(*doomed, return_exceptions=True)
                assert all(isinstance(each, httpx.TransportError) for each in broken)
                await until(lambda: seen_waiting(one) == 0, within_s=20)
                assert services.ledger.load("p", services.clock.now_s()).queued == 0
    finally:
        killed.end()
