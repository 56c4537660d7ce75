"""Who plans what is read ahead of turns, from what, and what it says; on a real Redis."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from mooncake_core.blocks import block_keys
from mooncake_core.promotion import MOST_TURNS, Came, Cursor, Ended, Found, PromotionStreams, Wanted
from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient
from mooncake_scheduler.conductor.tiering import Following, Wish
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.promotion import LEAD_TTL_S, Promoter, store_size
from mooncake_testing.gateway import gateway
from mooncake_testing.redis import RedisServer
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import until

NAMESPACE = "promotion-test"
BLOCK_BYTES = 100_000_000
SCALE = 100.0
"""Model seconds a wall second: a conversation's minute is over in 0.6 s."""


@pytest.fixture
def streams(client: RespClient) -> PromotionStreams:
    return PromotionStreams(client, NAMESPACE)


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    with Simulated() as processes:
        yield processes


def store(url: str) -> Instance:
    return Instance(
        id="pool", role=Role.STORE, url=url, cluster="test", pool="pool", model="tiny",
        engine=EngineKind.STORE, block_size_tokens=512,
    )  # fmt: skip


def holding_a_block(simulated: Simulated) -> SimulatedProcess:
    """A store with DRAM for ten blocks, one of which is in it."""
    master = simulated.master()
    simulated.node(master, "--ssd-size", "100GB", size=str(10 * BLOCK_BYTES))
    for call, body in (("put_start", {"objects": [("k", BLOCK_BYTES)]}), ("put_end", {"keys": ["k"]})):
        content = msgspec.msgpack.encode(body)
        assert httpx.post(f"{master.url}/rpc/{call}", content=content, trust_env=False).status_code == 200
    return master


@asynccontextmanager
async def roster_with(redis: RedisServer, url: str) -> AsyncIterator[Roster]:
    registry = RedisRegistry(redis.url, namespace=NAMESPACE)
    await registry.register(store(url))
    roster = Roster(registry, "tiny", count_lives=False)
    roster.block_size_tokens = 512
    await roster.refresh()
    roster.block_size_tokens = 512
    yield roster
    await registry.close()


def promoter(streams: PromotionStreams, roster: Roster, who: str) -> Promoter:
    return Promoter(streams, roster, "pool", who=who, time_scale=SCALE)


async def told(streams: PromotionStreams, stream: str) -> int:
    return int(await streams._client.call("XLEN", stream))


async def wishes(streams: PromotionStreams) -> Sequence[Wanted]:
    return await streams.read_wishes(Cursor(), 1_000)


async def test_what_is_told_is_read_once_and_in_order(streams: PromotionStreams) -> None:
    streams.came("r1", "ann", [1, 2**64 - 1])
    streams.ended("r1", stored=True)
    streams.ended("r2", stored=False)
    cursor = Cursor()
    first = await streams.read_turns(cursor, 2)
    now_s = await streams.now_s()
    assert isinstance(first[0], Came)
    assert (*first[0][1:3], list(first[0].keys)) == ("r1", "ann", [1, 2**64 - 1])
    assert first[1][1:] == ("r1", True)
    assert all(0 <= now_s - turn.at_s < 30 for turn in first)
    assert [turn[1:] for turn in await streams.read_turns(cursor, 2)] == [("r2", False)]
    assert await streams.read_turns(cursor, 2) == []
    await streams.report(Found(0.0, 7, (1,), (2, 3), ()))
    (found,) = await streams.read_findings(Cursor(), 9)
    assert (found.number, *map(list, found[2:])) == (7, [1], [2, 3], [])
    assert await streams.read_findings(await streams.newest(streams.findings), 9) == []


async def test_what_nobody_reads_does_not_fill_redis(streams: PromotionStreams, client: RespClient) -> None:
    for number in range(4 * MOST_TURNS):
        streams.came(str(number), "t", range(600))
        if number % 100 == 0:
            await streams.now_s()
    assert await told(streams, streams.turns) <= 1.2 * 2 * MOST_TURNS
    assert client.posted_errors == 0


async def test_who_takes_over_finds_the_last_thousand_prompts_and_their_ends(
    streams: PromotionStreams,
) -> None:
    for number in range(2 * MOST_TURNS):
        streams.came(str(number), "t", range(600))
        streams.ended(str(number), stored=True)
    turns = await streams.read_turns(Cursor(), 9 * MOST_TURNS)
    assert len([turn for turn in turns if isinstance(turn, Came)]) >= MOST_TURNS


async def test_wishes_that_are_too_old_to_be_of_use_leave_redis(
    streams: PromotionStreams, client: RespClient
) -> None:
    await client.call("XADD", streams.wishes, "1-0", "n", 0, "k", bytes(80_000))
    await streams.want([Wanted(1, [7])])

    async def only_the_new_one() -> bool:
        return [wish.number for wish in await wishes(streams)] == [1]

    await until(only_the_new_one)
    assert client.posted_errors == 0


async def test_who_reads_goes_on_with_the_next_redis_whose_clock_is_behind(
    redis_server: RedisServer, streams: PromotionStreams
) -> None:
    far_ahead_ms = 9_000_000_000_000
    cursor = Cursor()
    with redis_server.client() as redis:
        redis.xadd(streams.wishes, {"n": 1, "k": b""}, id=f"{far_ahead_ms}-1")
    assert [wish.number for wish in await streams.read_wishes(cursor, 9)] == [1]
    redis_server.restart()

    async def heard() -> bool:
        await streams.want([Wanted(2, [7])])
        return bool(await streams.read_wishes(cursor, 9))

    await until(heard, within_s=20)


async def test_one_plans_at_a_time_and_the_next_one_when_it_is_gone(streams: PromotionStreams) -> None:
    assert await streams.lead("a", 0.5)
    assert not await streams.lead("b", 0.5)
    assert await streams.lead("a", 0.5)

    async def taken_over() -> bool:
        return await streams.lead("b", 30)

    await until(taken_over)
    assert not await streams.lead("a", 0.5)


async def test_who_leaves_gives_the_lead_up_and_takes_nobody_elses(streams: PromotionStreams) -> None:
    assert await streams.lead("a", 60)
    await streams.leave("b")
    assert not await streams.lead("b", 60)
    await streams.leave("a")
    assert await streams.lead("b", 60)


async def test_conversations_that_left_dram_are_wanted_before_their_next_turn(
    redis_server: RedisServer, streams: PromotionStreams, simulated: Simulated
) -> None:
    master = await asyncio.to_thread(holding_a_block, simulated)
    async with roster_with(redis_server, master.bootstrap_url) as roster:
        one = promoter(streams, roster, "one")
        prompts = {number: range(1_000 * number, 1_000 * number + 4) for number in range(1, 7)}

        async def speak() -> None:
            for number, keys in prompts.items():
                streams.came(f"{number}", "t", keys)
                streams.ended(f"{number}", stored=True)
                await one.step()
                await asyncio.sleep(0.1)

        for _ in range(5):
            await speak()
        assert one.leads
        before = [wish for wish in await wishes(streams) if wish.number]
        # 24 blocks did not fit into DRAM for 10; into that of five nodes they do.
        for _ in range(4):
            await asyncio.to_thread(simulated.node, master, size=str(10 * BLOCK_BYTES))

        async def wanted() -> bool:
            one._measured_s = 0.0
            await one.step()
            return len([wish for wish in await wishes(streams) if wish.number]) > len(before)

        for _ in range(5):
            await speak()
        await until(wanted)
        last = (await wishes(streams))[-1]
        kept = [key for wish in await wishes(streams) if not wish.number for key in wish.keys]
        wanted_keys = {key for wish in await wishes(streams) if wish.number for key in wish.keys}
        assert wanted_keys <= {key for keys in prompts.values() for key in keys}
        assert set(kept) <= {key for keys in prompts.values() for key in keys}
        assert kept, "what is in DRAM was never looked up"
        assert last.keys
        text = "\n".join(str(family) for family in one.families())
        assert "mooncake_promotion_sessions" in text
        one.close()


async def test_who_takes_over_knows_the_conversations_of_before(
    redis_server: RedisServer, streams: PromotionStreams, simulated: Simulated
) -> None:
    master = await asyncio.to_thread(holding_a_block, simulated)
    async with roster_with(redis_server, master.bootstrap_url) as roster:
        one, two = promoter(streams, roster, "one"), promoter(streams, roster, "two")
        for number in range(1, 4):
            streams.came(f"{number}", "t", range(1_000 * number, 1_000 * number + 2))
            streams.ended(f"{number}", stored=True)
        await one.step()
        await two.step()
        assert (one.leads, two.leads) == (True, False)
        await streams.lead("one", 0.1)

        async def taken_over() -> bool:
            await two.step()
            return two.leads

        await until(taken_over, within_s=10 * LEAD_TTL_S)
        await one.step()
        assert not one.leads
        (sessions,) = [each for each in two.families() if each.name == "mooncake_promotion_sessions"]
        assert sessions.samples[0].value == 3
        one.close()
        two.close()


def known_sessions(promoter: Promoter) -> float:
    (family,) = [each for each in promoter.families() if each.name == "mooncake_promotion_sessions"]
    return float(family.samples[0].value)


async def test_who_leads_goes_on_learning_while_the_master_hangs(
    redis_server: RedisServer, streams: PromotionStreams, simulated: Simulated
) -> None:
    master = await asyncio.to_thread(holding_a_block, simulated)
    async with roster_with(redis_server, master.bootstrap_url) as roster:
        one = promoter(streams, roster, "one")
        await one.step()
        master.process.send_signal(signal.SIGSTOP)
        one._measured_s = 0.0
        streams.came("1", "t", range(4))
        await one.step()
        master.process.send_signal(signal.SIGCONT)
        assert not await streams.lead("two", LEAD_TTL_S), "its lead was over before it was done"
        assert known_sessions(one) == 1
        one.close()


async def test_turns_are_not_lost_where_redis_fails_in_between(
    redis_server: RedisServer, streams: PromotionStreams, client: RespClient, simulated: Simulated
) -> None:
    master = await asyncio.to_thread(holding_a_block, simulated)
    async with roster_with(redis_server, master.bootstrap_url) as roster:
        one = promoter(streams, roster, "one")
        await one.step()
        streams.came("1", "t", range(4))
        await client.call("SET", streams.findings, "no stream")
        with capture_logs() as logs:
            await one.step()
        assert [line["error"][:9] for line in logs] == ["WRONGTYPE"]
        await client.call("DEL", streams.findings)
        await one.step()
        assert known_sessions(one) == 1
        one.close()


async def test_a_plan_gives_way_to_requests_sooner_than_other_threads_do(
    redis_server: RedisServer,
    streams: PromotionStreams,
    simulated: Simulated,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen_s: list[float] = []
    plan = Following.plan

    def watched(self: Following, now_s: float, most_blocks: float) -> list[Wish]:
        seen_s.append(sys.getswitchinterval())
        return plan(self, now_s, most_blocks)

    monkeypatch.setattr(Following, "plan", watched)
    usual_s = sys.getswitchinterval()
    master = await asyncio.to_thread(holding_a_block, simulated)
    async with roster_with(redis_server, master.bootstrap_url) as roster:
        one = promoter(streams, roster, "one")
        await one.step()
        one.close()
    assert seen_s
    assert max(seen_s) < 0.001
    assert sys.getswitchinterval() == usual_s


async def test_nothing_is_planned_while_the_store_tells_nothing(
    redis_server: RedisServer, streams: PromotionStreams
) -> None:
    async with roster_with(redis_server, "http://127.0.0.1:9") as roster:
        one = promoter(streams, roster, "one")
        streams.came("1", "t", range(10))
        with capture_logs() as logs:
            await one.step()
            await one.step()
        (told,) = [line for line in logs if line["log_level"] == "warning"]
        assert "http://127.0.0.1:9/metrics" in told["error"]
        assert not one.leads
        assert await wishes(streams) == []
        roster.stores.clear()
        await one.step()
        assert not one.leads
        one.close()


def test_the_size_of_a_store_is_read_from_what_its_master_tells() -> None:
    text = (
        'segment_total_capacity_bytes{segment="a"} 1000\n'
        'segment_total_capacity_bytes{segment="b"} 1000\n'
        "master_total_capacity_bytes 2000\n"
        "master_value_size_bytes_sum 100\n"
        "master_value_size_bytes_count 10\n"
    )
    size = store_size(text)
    assert size is not None
    assert (size.nodes, size.block_bytes) == (2, 10.0)
    assert size.dram_blocks == pytest.approx(170)
    assert store_size(text.replace("count 10", "count 0")) is None
    assert store_size("") is None


async def test_a_gateway_tells_of_what_it_placed_and_whether_it_was_computed(
    tmp_path: Path, redis_server: RedisServer, streams: PromotionStreams
) -> None:
    engine = ScriptedEngine("a")
    registry = RedisRegistry(redis_server.url, namespace=NAMESPACE)
    async with engines(engine):
        for instance in (engine.instance(), store("http://127.0.0.1:9")):
            await registry.register(instance)
        async with gateway(
            tmp_path, [], instances_file=None, redis_url=redis_server.url, namespace=NAMESPACE,
            profile="llama3-70b-8xa800", promoted_store="pool",
        ) as serving:  # fmt: skip
            await until(lambda: not serving.scheduler.why_not_ready())
            assert (await serving.complete(prompt=list(range(70)))).status_code == 200
            engine.usual = Act(status=500)
            assert (await serving.complete(prompt=list(range(70)))).status_code >= 500

            async def all_told() -> bool:
                return await told(streams, streams.turns) == 4

            await until(all_told)
    turns = await streams.read_turns(Cursor(), 10)
    came = [turn for turn in turns if isinstance(turn, Came)]
    ended = [turn for turn in turns if isinstance(turn, Ended)]
    assert [list(turn.keys) for turn in came] == [list(block_keys(list(range(70)), 16))] * 2
    assert [turn.request for turn in ended] == [turn.request for turn in came]
    assert [turn.stored for turn in ended] == [True, False]
    await registry.close()
