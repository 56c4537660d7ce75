"""A reply on its way: tasks wait for it as for a future, flows are told in the turn in which it comes."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_core.resp import ReplyError
from mooncake_core.resp.pending import Pending


def pending() -> Pending:
    return Pending(asyncio.get_running_loop(), deadline_s=0.0)


async def wait_for(reply: Pending) -> object:
    return await reply


async def test_a_task_gets_the_reply_it_waits_for() -> None:
    reply = pending()
    task = asyncio.create_task(wait_for(reply))
    await asyncio.sleep(0)
    reply.fulfil(b"value")
    assert not task.done(), "a task goes on in a turn of its own"
    assert await task == b"value"


async def test_a_task_gets_what_came_instead_of_the_reply() -> None:
    reply = pending()
    task = asyncio.create_task(wait_for(reply))
    await asyncio.sleep(0)
    reply.fulfil(None, ReplyError("WRONGTYPE no"))
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        await task


async def test_a_reply_that_came_before_anyone_waited_is_there_at_once() -> None:
    reply = pending()
    reply.fulfil(7)
    assert await reply == 7


async def test_a_cancelled_task_leaves_the_reply_to_be_dropped() -> None:
    reply = pending()
    task = asyncio.create_task(wait_for(reply))
    await asyncio.sleep(0)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    reply.fulfil(b"late")
    assert reply.done()
    with pytest.raises(asyncio.CancelledError):
        reply.result()


async def test_a_timeout_ends_the_wait_as_it_ends_that_for_a_future() -> None:
    reply = pending()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await reply
    assert reply.done()


async def test_a_callback_without_a_context_is_called_in_the_same_turn() -> None:
    reply, told = pending(), []
    reply.add_done_callback(lambda each: told.append(each.result()))
    reply.fulfil(b"now")
    assert told == [b"now"]
    reply.fulfil(b"again")
    assert told == [b"now"], "waiting ends once"


async def test_a_callback_taken_back_is_not_called() -> None:
    reply, told = pending(), []
    callback = told.append
    reply.add_done_callback(callback)
    assert reply.remove_done_callback(callback) == 1
    reply.fulfil(b"value")
    assert told == []
