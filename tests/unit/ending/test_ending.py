from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, threading, uvloop
from mooncake_core.ending import then_exit

async def work():
    never = threading.Event()
    asyncio.get_running_loop().run_in_executor(None, never.wait)
    print("given back")
    {end}

uvloop.run(then_exit(work()))
"""


def test_a_process_ends_with_its_status_though_a_thread_still_waits() -> None:
    program = PROGRAM.format(end="return 3")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stdout) == (3, "given back\n")


def test_what_the_work_raises_is_seen() -> None:
    program = PROGRAM.format(end="raise OSError('the port is taken')").replace("run_in_executor", "call_soon")
    program = program.replace("(None, never.wait)", "(never.is_set)")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert ran.returncode == 1
    assert "the port is taken" in ran.stderr


WRONGLY_SET_UP = {
    "mooncake_scheduler": (["--config", "/nowhere"], {}),
    "mooncake_sidecar.engine": ([], {}),
    "mooncake_operator": ([], {"MOONCAKE_OPERATOR_METRICS_PORT": "none"}),
}


@pytest.mark.parametrize("room", WRONGLY_SET_UP)
def test_who_cannot_be_set_up_says_so_and_ends_with_2_even_where_it_cannot_be_said(room: str) -> None:
    arguments, environ = WRONGLY_SET_UP[room]
    command, env = [sys.executable, "-m", room, *arguments], {**os.environ, **environ}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert ran.returncode == 2
    assert room.split(".")[0].replace("_", "-") in ran.stderr.replace("_", "-")

    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, env=env, stdout=full, stderr=full, timeout=60).returncode == 2
