from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from mooncake_scheduler.gateway.flow import ClientLeftError, DeadlineError, Flow, StagedLostError, park


class Run:
    """A flow with what became of it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.done = 0
        self.errors: list[BaseException] = []
        self.flow = Flow(coroutine, self._ended, self.errors.append)
        self.flow.start()

    def _ended(self, _: Flow) -> None:
        self.done += 1


def test_a_flow_runs_at_once_and_goes_on_when_it_is_woken() -> None:
    seen = []

    async def work() -> None:
        seen.append("begun")
        await park()
        seen.append("ended")

    run = Run(work())
    assert (seen, run.done) == (["begun"], 0)
    run.flow.wake()
    assert (seen, run.done) == (["begun", "ended"], 1)
    run.flow.wake()
    run.flow.interrupt(ClientLeftError())
    assert run.done == 1


async def test_a_flow_waits_for_futures_as_a_task_does() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen = []

    async def work() -> None:
        seen.append(await future)

    run = Run(work())
    run.flow.wake()
    assert run.done == 0
    future.set_result(7)
    await asyncio.sleep(0)
    assert (seen, run.done) == ([7], 1)


@pytest.mark.parametrize("waits_for", ["park", "future"])
async def test_an_interruption_arrives_where_the_flow_waits(waits_for: str) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen = []

    async def work() -> None:
        try:
            await (park() if waits_for == "park" else future)
        except ClientLeftError:
            seen.append("left")
        await park()
        seen.append("cleaned up")

    run = Run(work())
    run.flow.interrupt(ClientLeftError())
    assert seen == ["left"]
    assert future.cancelled() == (waits_for == "future")
    await asyncio.sleep(0)
    run.flow.wake()
    assert (seen, run.done, run.errors) == (["left", "cleaned up"], 1, [])


async def test_a_future_that_was_done_when_the_flow_was_interrupted_wakes_it_no_more() -> None:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()
    second: asyncio.Future[int] = loop.create_future()
    seen: list[object] = []

    async def work() -> None:
        try:
            await first
        except ClientLeftError:
            seen.append("left")
        seen.append(await second)

    run = Run(work())
    # The reply and the end of the connection come in one turn of the loop.
    loop.call_soon(run.flow.interrupt, ClientLeftError())
    first.set_result(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (seen, run.errors) == (["left"], [])
    second.set_result(2)
    await asyncio.sleep(0)
    assert (seen, run.done, run.errors) == (["left", 2], 1, [])


def test_an_interruption_of_a_running_flow_arrives_at_its_next_wait() -> None:
    seen = []

    async def work() -> None:
        run_flow[0].interrupt(ClientLeftError())
        seen.append("still running")
        try:
            await park()
        except ClientLeftError:
            seen.append("left")

    run_flow: list[Flow] = []
    flow = Flow(work(), lambda _: None, seen.append)  # type: ignore[arg-type]
    run_flow.append(flow)
    flow.start()
    assert seen == ["still running", "left"]


def test_a_shielded_flow_is_interrupted_only_afterwards() -> None:
    seen = []

    async def work() -> None:
        shield[0].shielded = True
        await park()
        seen.append("not disturbed")
        shield[0].shielded = False
        try:
            await park()
        except ClientLeftError:
            seen.append("left")

    shield: list[Flow] = []
    flow = Flow(work(), lambda _: None, seen.append)  # type: ignore[arg-type]
    shield.append(flow)
    flow.start()
    flow.interrupt(ClientLeftError())
    assert seen == []
    flow.wake()
    assert seen == ["not disturbed", "left"]


def test_a_deadline_interrupts_once() -> None:
    seen = []

    async def work() -> None:
        for _ in range(2):
            try:
                await park()
            except DeadlineError:
                seen.append("too late")

    run = Run(work())
    run.flow.deadline_s = 5.0
    run.flow.expire(4.0)
    assert seen == []
    run.flow.expire(5.1)
    run.flow.expire(100.0)
    assert (seen, run.done) == (["too late"], 0)
    run.flow.wake()
    assert run.done == 1


def test_an_error_that_escapes_is_told_and_the_flow_has_ended() -> None:
    async def work() -> None:
        await park()
        raise ValueError("bug")

    run = Run(work())
    run.flow.wake()
    assert run.done == 1
    assert isinstance(run.errors[0], ValueError)


def test_that_the_client_left_is_not_forgotten_over_what_comes_later() -> None:
    seen: list[object] = []

    async def work() -> None:
        shield[0].shielded = True
        await park()
        shield[0].shielded = False
        try:
            shield[0].check()
        except ClientLeftError:
            seen.append("left")

    shield: list[Flow] = []
    flow = Flow(work(), lambda _: None, seen.append)
    shield.append(flow)
    flow.start()
    for reason in (DeadlineError(), ClientLeftError(), StagedLostError(), DeadlineError()):
        flow.interrupt(reason)
    flow.wake()
    assert seen == ["left"]


async def test_a_future_that_is_never_waited_for_because_of_an_interruption_is_cancelled() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        run_flow[0].interrupt(ClientLeftError())
        await future

    run_flow: list[Flow] = []
    errors: list[BaseException] = []
    flow = Flow(work(), lambda _: None, errors.append)
    run_flow.append(flow)
    flow.start()
    assert future.cancelled()
    assert isinstance(errors[0], ClientLeftError)
