"""Schedulers on a real Redis that dies, hangs and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf

import pytest

from mooncake_core.ledger import Limits, RedisLedger, RefusalReason, Reservation, row
from mooncake_core.ledger.contract import SeatLimits
from mooncake_core.ledger.scripts import POST
from mooncake_core.resp import DeadlineError, RespClient, Script
from mooncake_testing.redis import RedisServer
from mooncake_testing.waiting import until

PREFIX = "{test}:"
_BUSY_FOR_150_MS = """
local began = redis.call('TIME')
repeat local now = redis.call('TIME')
until (now[1] - began[1]) * 1000000 + now[2] - began[2] > 150000
"""
Opener = Callable[..., Awaitable[RedisLedger]]


def reservation(name: str, **changes: object) -> Reservation:
    fields = dict(id=name, prefill="p", prefill_cost_s=1.0, decode="d", kv_tokens=100, prefill_end_s=5.0,
                  decode_end_s=9.0)  # fmt: skip
    return Reservation(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
async def open_ledger(redis_server: RedisServer) -> AsyncIterator[Opener]:
    clients: list[RespClient] = []

    async def opener(*, ttl_s: float = 3.0, budget_s: float = 0.5) -> RedisLedger:
        client = RespClient(redis_server.url, stall_s=0.2)
        clients.append(client)
        await client.connect()
        return RedisLedger(client, prefix=PREFIX, heartbeat_ttl_s=ttl_s, reserve_budget_s=budget_s)

    yield opener
    for client in clients:
        await client.close()


async def refreshes(ledger: RedisLedger) -> bool:
    try:
        await ledger.refresh(0.0)
    except ConnectionError:
        return False
    return True


def totals(server: RedisServer) -> dict[str, int]:
    """What all schedulers hold, by field, read past the ledger."""
    sums: dict[str, int] = {}
    with server.client() as client:
        for key in client.scan_iter(f"{PREFIX}ledger:row:*"):
            for name, value in client.hgetall(key).items():
                if name != b"gen":
                    sums[name.decode()] = sums.get(name.decode(), 0) + int(value)
    return sums


async def test_of_many_schedulers_that_want_the_last_places_at_once_only_as_many_get_one(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledgers = [await open_ledger(budget_s=10) for _ in range(4)]
    asked = [
        ledger.reserve(reservation(f"{n}-{i}"), Limits(batch=5), 0.0)
        for i in range(5)
        for n, ledger in enumerate(ledgers)
    ]
    answers = await asyncio.gather(*asked)
    assert answers.count(None) == 5
    assert answers.count(RefusalReason.TBT) == 15
    assert totals(redis_server) == {"q:p": 5_000_000, "n:d": 5, "k:d": 500}


async def test_a_scheduler_that_died_is_reaped_by_a_live_one_and_one_that_lives_is_not(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    alive, dead = await open_ledger(ttl_s=0.3), await open_ledger(ttl_s=0.3)
    await alive.reserve(reservation("a"), Limits(), 0.0)
    await dead.reserve(reservation("b"), Limits(), 0.0)
    await alive.refresh(0.0)
    assert totals(redis_server)["n:d"] == 2

    async def reaped() -> bool:
        await alive.refresh(0.0)
        return totals(redis_server)["n:d"] == 1

    await until(reaped)
    assert alive.loads(0.0)["d"].arriving == 1
    assert alive.posted == 1


async def test_what_was_admitted_survives_the_death_of_redis(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    one, two = await open_ledger(), await open_ledger()
    await one.reserve(reservation("a"), Limits(), 0.0)
    await two.reserve(reservation("b"), Limits(), 0.0)
    redis_server.kill()
    with pytest.raises(ConnectionError):
        await one.reserve(reservation("c"), Limits(), 0.0)
    assert one.reserve_locally(reservation("c"), Limits(batch=3), 0.0) is None
    assert one.reserve_locally(reservation("d"), Limits(batch=2), 0.0) is RefusalReason.TBT
    two.prefill_finished("b", 1.0)
    redis_server.restart()
    await until(lambda: refreshes(one))
    await until(lambda: refreshes(two))
    await one.refresh(0.0)
    assert totals(redis_server) == {"q:p": 2_000_000, "n:d": 3, "k:d": 300, "s:d": 1, "t:d": 100}
    assert (one.loads(0.0)["d"].arriving, one.loads(0.0)["d"].batch) == (2, 1)


async def test_what_ended_while_redis_was_away_is_not_in_it_afterwards(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger()
    for name in ("a", "b"):
        await ledger.reserve(reservation(name), Limits(), 0.0)
    redis_server.kill()
    ledger.release("a", 1.0)
    ledger.release("b", 1.0)
    redis_server.restart()
    await until(lambda: refreshes(ledger))
    assert totals(redis_server) == {}
    assert ledger.loads(2.0) == {}


async def test_a_reservation_that_took_too_long_is_not_kept(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger(budget_s=0.1)
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    redis_server.pause()
    with pytest.raises(ConnectionError):
        await ledger.reserve(reservation("b"), Limits(), 0.0)
    redis_server.resume()
    await until(lambda: refreshes(ledger))
    assert totals(redis_server) == {"q:p": 1_000_000, "n:d": 1, "k:d": 100}


async def test_a_reservation_whose_caller_left_is_not_kept(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger(budget_s=10)
    await ledger.refresh(0.0)
    asking = asyncio.create_task(ledger.reserve(reservation("a"), Limits(), 0.0))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: refreshes(ledger))
    assert totals(redis_server) == {}


async def test_scripts_that_redis_forgot_lose_no_release(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger()
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    with redis_server.client() as client:
        client.script_flush()
    ledger.release("a", 1.0)

    async def empty() -> bool:
        await ledger.refresh(1.0)
        return totals(redis_server) == {}

    await until(empty)


async def test_a_scheduler_that_leaves_takes_all_it_holds_along(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    leaving, staying = await open_ledger(), await open_ledger()
    await leaving.reserve(reservation("a"), Limits(), 0.0)
    await staying.refresh(0.0)
    await leaving.close()
    await leaving.refresh(0.0)
    await staying.refresh(0.0)
    assert staying.loads(0.0) == {}
    assert totals(redis_server) == {}


async def test_a_quiet_life_posts_its_table_once(open_ledger: Opener) -> None:
    ledger = await open_ledger()
    for number in range(50):
        await ledger.reserve(reservation(f"{number}"), Limits(), 0.0)
        ledger.prefill_finished(f"{number}", 1.0)
        ledger.release(f"{number}", 2.0)
        await ledger.refresh(2.0)
    assert ledger.posted == 1


async def test_of_schedulers_that_move_a_prefill_to_the_same_instance_at_once_one_does(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledgers = [await open_ledger(budget_s=10) for _ in range(4)]
    for n, ledger in enumerate(ledgers):
        await ledger.reserve(reservation(f"busy-{n}"), Limits(), 0.0)
        await ledger.reserve(reservation(f"waits-{n}", waits_above_s=0.0), Limits(), 0.0)
    moves = [
        ledger.move(reservation(f"waits-{n}", prefill="other", prefill_cost_s=2.0), 0.1, 1.0)
        for n, ledger in enumerate(ledgers)
    ]
    assert sorted(await asyncio.gather(*moves)) == [False, False, False, True]
    assert totals(redis_server) == {"q:p": 7_000_000, "q:other": 2_000_000, "n:d": 8, "k:d": 800}


async def test_while_redis_is_away_a_prefill_waits_on_where_it_did(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger()
    for name in ("a", "b"):
        await ledger.reserve(reservation(name, waits_above_s=0.0), Limits(), 0.0)
    redis_server.kill()
    with pytest.raises(ConnectionError):
        await ledger.move(reservation("b", prefill="other"), 0.1, 1.0)
    assert len(ledger.load("p", 1.0).waiting) == 1
    redis_server.restart()
    # It is `refresh` that posts the table: one that waits for its turn does not wait for that.
    posted = ledger.posted
    with pytest.raises(ConnectionError, match="as it is"):
        await ledger.move(reservation("b", prefill="other"), 0.1, 1.0)
    assert ledger.posted == posted
    await until(lambda: refreshes(ledger))
    assert totals(redis_server) == {"q:p": 2_000_000, "n:d": 2, "k:d": 200}
    assert await ledger.move(reservation("b", prefill="other"), 0.1, 1.0)
    with pytest.raises(LookupError, match="no reservation a waits"):
        await ledger.move(reservation("a", prefill="other"), 0.1, 1.0)


async def test_a_hanging_redis_costs_no_request_more_than_its_budget_whoever_posts_the_table(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger(budget_s=0.02)
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    redis_server.pause()
    with pytest.raises(ConnectionError):
        await ledger.reserve(reservation("b"), Limits(), 0.0)
    posting = asyncio.create_task(ledger.refresh(0.0))
    await asyncio.sleep(0)
    with pytest.raises(ConnectionError):
        await ledger.reserve(reservation("c"), Limits(), 0.0)
    waiting = [ledger.reserve(reservation(f"c{n}"), Limits(), 0.0) for n in range(5)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert not posting.done(), "the requests waited for the posting to fail"
    assert {type(answer) for answer in answers} == {DeadlineError}
    redis_server.resume()
    await asyncio.gather(posting, return_exceptions=True)
    await until(lambda: refreshes(ledger))
    assert totals(redis_server) == {"q:p": 1_000_000, "n:d": 1, "k:d": 100}


async def test_a_request_that_ends_while_it_waits_for_the_table_leaves_the_others_waiting_for_nothing(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    """As the gateway's flows end: by an exception of their own, thrown in where they wait."""
    ledger = await open_ledger()
    await ledger.refresh(0.0)
    redis_server.pause()
    posting = asyncio.create_task(ledger.reserve(reservation("a"), Limits(), 0.0))
    await asyncio.sleep(0)
    assert ledger.reserve_locally(reservation("local"), Limits(), 0.0) is None
    posting_it = asyncio.create_task(ledger.refresh(0.0))
    await asyncio.sleep(0.01)
    assert ledger.reserve_locally(reservation("local too"), Limits(), 0.0) is None
    leaving = ledger.reserve(reservation("b"), Limits(), 0.0)
    leaving.send(None)._asyncio_future_blocking = False  # type: ignore[attr-defined]
    staying = asyncio.create_task(ledger.reserve(reservation("c"), Limits(), 0.0))
    left: list[BaseException] = []

    def leave(_: object) -> None:
        try:
            leaving.throw(RuntimeError("the client left"))  # type: ignore[attr-defined]
        except RuntimeError as error:
            left.append(error)

    # In the turn in which the posting ends, and before whoever waited for it goes on.
    posting_it.add_done_callback(leave)
    redis_server.resume()
    async with asyncio.timeout(10):
        await asyncio.gather(posting, posting_it, return_exceptions=True)
        assert left
        await asyncio.gather(staying, return_exceptions=True)
        await until(lambda: refreshes(ledger))
        assert await ledger.reserve(reservation("d"), Limits(), 0.0) is None


async def test_a_table_that_takes_longer_to_post_than_requests_wait_is_posted_once_and_they_with_it(
    open_ledger: Opener, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "POST", Script(_BUSY_FOR_150_MS + POST.source.decode()))
    ledger = await open_ledger(budget_s=0.02)
    alone = []
    for n in range(60):
        wanted = reservation(str(n), waits_above_s=inf if n % 2 else 0.5)
        try:
            await ledger.reserve(wanted, Limits(), 0.0)
        except ConnectionError:
            ledger.reserve_locally(wanted, Limits(), 0.0)
            alone.append(n)
        await asyncio.sleep(0.01)
    assert ledger.posted == 1
    assert 0 < len(alone) < 50, "none was alone any more once Redis held the table"
    assert totals(redis_server) == {"q:p": 60_000_000, "n:d": 60, "k:d": 6_000}
    with redis_server.client() as admin:
        waiting = {
            member.decode().split("|")[1]
            for member, handed_over_s in admin.zrange(f"{PREFIX}ledger:queue:p", 0, -1, withscores=True)
            if handed_over_s == inf
        }
    assert waiting == {str(n) for n in range(60) if ledger.waiting(str(n))}
    assert waiting >= {str(n) for n in alone if n % 2 == 0 and n}
    for n in range(60):
        ledger.release(str(n), 1.0)
    await ledger.refresh(1.0)
    assert totals(redis_server) == {}


async def test_what_is_prefilled_while_the_table_is_posted_decodes_in_redis_too(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger(budget_s=0.02)
    for name in ("a", "b"):
        await ledger.reserve(reservation(name), Limits(), 0.0)
        ledger.prefill_finished(name, 1.0, held=True)
    await ledger.refresh(1.0)
    redis_server.pause()
    with pytest.raises(ConnectionError):
        await ledger.seat("a", "e", SeatLimits(), 1.0)
    assert ledger.seat_locally("a", "e", SeatLimits(), 1.0) is None
    posting = asyncio.create_task(ledger.refresh(1.0))
    await asyncio.sleep(0.01)
    with pytest.raises(ConnectionError):
        await ledger.seat("b", "e", SeatLimits(), 1.0)
    assert ledger.seat_locally("b", "e", SeatLimits(), 1.0) is None
    redis_server.resume()
    await posting
    await ledger.refresh(1.0)
    assert ledger.posted == 2
    assert totals(redis_server) == {"n:e": 2, "k:e": 200, "s:e": 2, "t:e": 200}


async def test_a_ledger_that_is_closed_posts_nothing_for_who_waited_for_it(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    ledger = await open_ledger(budget_s=5.0)
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    redis_server.pause()
    ledger._row.doubt()
    waiting = [asyncio.create_task(ledger.reserve(reservation(name), Limits(), 0.0)) for name in "bcd"]
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(ledger.close())
    await asyncio.sleep(0.01)
    redis_server.resume()
    await closing
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(answer) for answer in answers} == {ConnectionError}
    with redis_server.client() as admin:
        assert [key for key in admin.keys(f"{PREFIX}ledger:*") if b"since" not in key] == []


async def test_a_peer_whose_words_are_not_understood_counts_in_reserve_and_hides_no_other(
    open_ledger: Opener, redis_server: RedisServer
) -> None:
    one, strange, other = await open_ledger(), await open_ledger(), await open_ledger()
    await strange.reserve(reservation("a"), Limits(), 0.0)
    await other.reserve(reservation("b"), Limits(), 0.0)
    for ledger in (strange, other):
        await ledger.refresh(0.0)
    with redis_server.client() as admin:
        admin.hset(
            f"{PREFIX}ledger:snap:{strange.incarnation}", mapping={"v": "99", "b": b"\x81\xa1d\x93ab\xc0"}
        )
    for _ in range(2):
        await one.refresh(0.0)
        assert one.loads(0.0)["d"].arriving == 1
    assert await one.reserve(reservation("c"), Limits(batch=2), 0.0) is RefusalReason.TBT
