from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys, structlog
from mooncake_core.ending import then_exit
from mooncake_core.standard_streams import lose_what_cannot_be_written

async def work():
    return 3

lose_what_cannot_be_written()
logging.basicConfig(level="INFO", format="%(message)s")
log = structlog.PrintLogger(sys.stderr)
{body}
import asyncio
asyncio.run(then_exit(work()))
"""


def start(body: str, log: Path) -> subprocess.Popen[str]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=body)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
        )  # fmt: skip


def test_what_was_lost_is_told_by_the_first_line_that_can_be_written_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = """
for name in "abcd":
    input()
    log.info(f"structlog {name}")
    logging.info("logging %s", name)
    print("print", name, file=sys.stderr)
    print('done')
"""
    with start(body, log) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def turn() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        turn()
        room = log.stat().st_size
        unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        # Room for the begin of a line.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room + 4, unlimited[1]))
        turn()
        turn()
        assert log.stat().st_size == room + 4
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
        turn()
        assert process.wait(60) == 3

    *before, cut, told, structlog_d, logging_d, print_d = log.read_text().splitlines()
    assert before == ["structlog a", "logging a", "print a"]
    assert cut == "stru"
    notice = json.loads(told)
    assert notice["event"] == "lines of this log were lost"
    assert (notice["lines"], notice["why"]) == (6, "File too large")
    assert [structlog_d, logging_d, print_d] == ["structlog d", "logging d", "print d"]


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-", ">/dev/full", ">/dev/full 2>/dev/full"])
def test_a_process_ends_with_its_status_wherever_its_output_goes(closed: str) -> None:
    program = PROGRAM.format(body="print('x', file=sys.stderr); print('y', 'z' * 100_000)")
    ran = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program], capture_output=True, timeout=60
    )
    assert ran.returncode == 3
