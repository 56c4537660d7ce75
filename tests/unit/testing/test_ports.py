"""Ports that tests are given."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import mooncake_testing
from mooncake_testing.ports import free_port, free_ports

WITH_THESE = os.environ | {"PYTHONPATH": str(Path(mooncake_testing.__file__).parents[1])}
TAKE = """
import resource
# What most machines have.
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from mooncake_testing.ports import free_port
print(*[free_port() for _ in range(300)], flush=True)
input()
"""


def test_no_port_is_given_to_two_tests_that_run_side_by_side() -> None:
    others = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=WITH_THESE
        )
        for _ in range(2)
    ]
    given = [free_port() for _ in range(300)]
    for other in others:
        assert other.stdout is not None
        given += [int(port) for port in other.stdout.readline().split()]
    for other in others:
        other.communicate(b"\n")
    assert len(given) == len(set(given)) == 900


def test_neighbours_are_all_free_to_listen_on_and_none_on_which_somebody_listens_is_given() -> None:
    base = free_ports(10)
    servers = [socket.create_server(("127.0.0.1", base + n)) for n in range(10)]
    try:
        assert not set(range(base, base + 10)) & {free_port() for _ in range(500)}
    finally:
        for server in servers:
            server.close()


def test_so_many_ports_are_given_as_are_asked_for_whatever_number_of_files_may_be_open() -> None:
    many = TAKE.replace("300", "1500").replace("input()", "")
    done = subprocess.run([sys.executable, "-c", many], stdout=subprocess.PIPE, env=WITH_THESE, timeout=60)
    assert done.returncode == 0
    assert len(done.stdout.split()) == 1500
