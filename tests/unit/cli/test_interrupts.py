"""Which signals end a command in order, and which it does not hear."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from mooncake_testing.waiting import until
from mooncakectl.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_asks_and_each_further_one_insists(number: signal.Signals) -> None:
    insisted: list[bool] = []
    # Tests that are run with nohup do not hear SIGHUP.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with Interrupts(lambda: insisted.append(True)) as interrupts:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(interrupts.asked.wait(), 5)
            assert not insisted
            for times in (1, 2):
                os.kill(os.getpid(), number)
                await until(lambda times=times: len(insisted) == times)
    finally:
        signal.signal(number, before)


async def test_nohup_keeps_a_command_from_hearing_that_its_terminal_is_gone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(lambda: None) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(interrupts.asked.wait(), 5)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
