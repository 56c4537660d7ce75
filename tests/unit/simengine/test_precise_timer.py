import asyncio
import time

import pytest

from mooncake_simulator.engine.clock import ModelClock
from mooncake_simulator.engine.precise_timer import PreciseTimer


async def test_a_wait_never_ends_too_early_and_many_in_a_row_do_not_drift() -> None:
    timer = PreciseTimer()
    started = time.monotonic()
    for number in range(1, 101):
        await timer.until(started + number * 0.0007)
        assert time.monotonic() >= started + number * 0.0007
    timer.close()


async def test_a_moment_that_has_passed_lets_others_run() -> None:
    timer = PreciseTimer()
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    await timer.until(time.monotonic() - 1)
    assert ran
    timer.close()


async def test_a_wait_that_was_given_up_does_not_disturb_the_next() -> None:
    timer = PreciseTimer()
    waiting = asyncio.ensure_future(timer.until(time.monotonic() + 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    moment = time.monotonic() + 0.01
    await timer.until(moment)
    assert time.monotonic() >= moment
    timer.close()


async def test_model_seconds_pass_as_many_times_faster_as_the_scale_says() -> None:
    clock = ModelClock(100.0)
    started = time.monotonic()
    begun_s = clock.now_s()
    await clock.until(begun_s + 5.0)
    assert time.monotonic() - started >= 0.0499
    assert clock.now_s() >= begun_s + 5.0
    clock.close()
