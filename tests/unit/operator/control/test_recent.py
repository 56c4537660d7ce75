"""Answers that hold until something is said to have changed."""

from __future__ import annotations

import asyncio

from mooncake_operator.control.recent import Recent


class World:
    def __init__(self) -> None:
        self.things = ["a"]
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self) -> list[str]:
        self.asked += 1
        seen = [*self.things]
        await self.answers.wait()
        return seen


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_what_has_not_changed_is_not_asked_again() -> None:
    world, recent = World(), Recent(trusted=True)
    assert [await recent.get("k", world.read, for_s=60) for _ in range(3)] == [["a"]] * 3
    assert world.asked == 1


async def test_a_change_is_seen_by_the_next_question_and_by_no_other_kinds() -> None:
    world, other, recent = World(), World(), Recent(trusted=True)
    await recent.get("k", world.read, for_s=60)
    await recent.get("l", other.read, for_s=60)
    world.things = ["a", "b"]
    recent.changed("k")
    assert await recent.get("k", world.read, for_s=60) == ["a", "b"]
    await recent.get("l", other.read, for_s=60)
    assert (world.asked, other.asked) == (2, 1)


async def test_what_changes_while_a_question_is_under_way_is_asked_again() -> None:
    world, recent = World(), Recent(trusted=True)
    world.answers.clear()
    first = asyncio.create_task(recent.get("k", world.read, for_s=60))
    await asyncio.sleep(0)
    world.things = ["b"]
    recent.changed("k")
    world.answers.set()
    assert await first == ["a"]
    assert await recent.get("k", world.read, for_s=60) == ["b"]


async def test_no_answer_holds_for_ever_for_a_watch_may_have_lost_an_event() -> None:
    world, clock = World(), Clock()
    recent = Recent(trusted=True, clock=clock)
    await recent.get("k", world.read, for_s=60)
    world.things = ["b"]
    clock.now_s += 59
    assert await recent.get("k", world.read, for_s=60) == ["a"]
    clock.now_s += 1
    assert await recent.get("k", world.read, for_s=60) == ["b"]


async def test_after_a_gap_in_a_watch_everything_is_asked_anew() -> None:
    world, other, recent = World(), World(), Recent(trusted=True)
    await recent.get("k", world.read, for_s=60)
    await recent.get("l", other.read, for_s=60)
    recent.forget()
    await recent.get("k", world.read, for_s=60)
    await recent.get("l", other.read, for_s=60)
    assert (world.asked, other.asked) == (2, 2)


async def test_where_nobody_tells_of_changes_everything_is_asked_each_time() -> None:
    world, recent = World(), Recent(trusted=False)
    await recent.get("k", world.read, for_s=60)
    await recent.get("k", world.read, for_s=60)
    assert world.asked == 2
