import asyncio

import pytest

from mooncake_simulator.engine.links import FairLink, SharedLink


def test_one_flow_takes_its_bytes_over_the_bandwidth() -> None:
    link = FairLink(100)
    link.start(500, 1.0)
    assert link.next_end_s() == pytest.approx(6.0)
    assert link.advance(5.9) == []
    assert link.advance(6.0) == [1]
    assert link.flows == 0


def test_flows_share_evenly_and_speed_up_when_one_ends() -> None:
    link = FairLink(100)
    link.start(100, 0.0)
    link.start(300, 0.0)
    assert link.advance(2.0) == [1]
    assert link.next_end_s() == pytest.approx(4.0)


def test_a_cancelled_flow_leaves_its_share_to_the_others() -> None:
    link = FairLink(100)
    first = link.start(100, 0.0)
    link.start(100, 0.0)
    link.cancel(first, 1.0)
    assert link.next_end_s() == pytest.approx(1.5)


async def test_coroutines_wait_until_their_bytes_are_through_in_the_order_of_their_size() -> None:
    loop = asyncio.get_running_loop()
    link = SharedLink(1000, loop.time, 1.0)
    order: list[int] = []

    async def carry(size: int) -> None:
        await link.carry(size)
        order.append(size)

    await asyncio.gather(carry(30), carry(10), carry(20))
    assert order == [10, 20, 30]
    assert link.flows == 0


async def test_a_coroutine_that_gives_up_frees_its_share() -> None:
    loop = asyncio.get_running_loop()
    link = SharedLink(1, loop.time, 1.0)
    waiting = asyncio.ensure_future(link.carry(1000))
    await asyncio.sleep(0)
    assert link.flows == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert link.flows == 0


async def test_a_flow_that_ends_in_the_moment_in_which_another_begins_or_gives_up_is_told() -> None:
    now_s = 0.0

    def passing() -> float:
        # Each look at the clock takes a little while.
        nonlocal now_s
        now_s += 0.25
        return now_s

    link = SharedLink(100.0, passing, time_scale=1_000.0)
    for begun_after in range(8):
        first = asyncio.ensure_future(link.carry(100.0))
        await asyncio.sleep(0)
        for _ in range(begun_after):
            passing()
        others = [asyncio.ensure_future(link.carry(50.0)) for _ in range(2)]
        await asyncio.sleep(0)
        others[0].cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(first, *others, return_exceptions=True)
        assert link.flows == 0
