"""Who leads does not depend on how busy the passes are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from mooncake_operator.control.leadership import LeadershipLostError
from mooncake_operator.control.leadership_thread import LeadershipThread


class Candidate:
    """Renews as fast as it can, until it is told to lose."""

    def __init__(self) -> None:
        self.renewals = 0
        self.loses = False
        self.released = False
        self.closed = False

    async def acquire(self) -> None:
        await asyncio.sleep(0)

    async def hold(self) -> None:
        while not self.loses:
            self.renewals += 1
            await asyncio.sleep(0.005)
        raise LeadershipLostError("another has it")

    async def release(self) -> None:
        self.released = True


def in_thread(candidate: Candidate, ended: list[int], end_within_s: float = 0.05) -> LeadershipThread:
    @asynccontextmanager
    async def make() -> AsyncIterator[Candidate]:
        yield candidate
        candidate.closed = True

    return LeadershipThread(make, end_within_s=end_within_s, end=ended.append)


def block_until(holds: Callable[[], bool]) -> None:
    """Keep this thread's event loop from turning meanwhile."""
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


async def test_a_loop_that_hangs_costs_no_lease() -> None:
    candidate, ended = Candidate(), list[int]()
    thread = in_thread(candidate, ended)
    await thread.acquire()
    hold = asyncio.create_task(thread.hold())
    await asyncio.sleep(0)
    block_until(lambda: candidate.renewals >= 3)
    assert not hold.done()
    hold.cancel()
    await thread.release()
    assert candidate.released
    assert candidate.closed
    assert ended == []


async def test_who_loses_the_lease_while_its_loop_hangs_is_ended() -> None:
    candidate, ended = Candidate(), list[int]()
    thread = in_thread(candidate, ended)
    await thread.acquire()
    hold = asyncio.create_task(thread.hold())
    await asyncio.sleep(0)
    candidate.loses = True
    block_until(lambda: ended == [1])
    with pytest.raises(LeadershipLostError):
        await hold
    await thread.release()


async def test_who_loses_the_lease_and_ends_in_time_is_left_to_it() -> None:
    candidate, ended = Candidate(), list[int]()
    thread = in_thread(candidate, ended, end_within_s=3600)
    await thread.acquire()
    candidate.loses = True
    with pytest.raises(LeadershipLostError, match="another has it"):
        await thread.hold()
    await thread.release()
    assert ended == []


async def test_a_wait_for_the_lease_can_be_given_up() -> None:
    candidate, ended = Candidate(), list[int]()
    thread = in_thread(candidate, ended)
    acquire = asyncio.create_task(thread.acquire())
    await asyncio.sleep(0)
    acquire.cancel()
    await thread.release()
    assert ended == []
