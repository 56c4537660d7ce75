"""Requests side by side."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_operator.control.together import together
from mooncake_testing.virtual_time import run_in_virtual_time


async def answer(after_s: float, value: int, done: list[int]) -> int:
    await asyncio.sleep(after_s)
    done.append(value)
    if value < 0:
        raise ValueError(value)
    return value


def test_answers_come_in_the_order_of_the_questions() -> None:
    async def scenario() -> list[int]:
        return await together(answer(seconds, value, []) for value, seconds in ((1, 3), (2, 1), (3, 2)))

    assert run_in_virtual_time(scenario()) == [1, 2, 3]


def test_a_failure_is_told_when_nobody_goes_on_any_more() -> None:
    done: list[int] = []

    async def scenario() -> None:
        with pytest.raises(ValueError, match="-1"):
            await together([answer(1, -1, done), answer(2, -2, done), answer(3, 3, done)])

    run_in_virtual_time(scenario())
    assert done == [-1, -2, 3]
