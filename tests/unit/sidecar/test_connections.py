"""Who is connected to an engine, as the kernel tells."""

from __future__ import annotations

import socket

import pytest

from mooncake_sidecar.engine.connections import Connection, callers, count_callers, parse

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0
   1: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 12 1 0
   2: 0100007F:C350 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 13 1 0
   3: 0100007F:1F40 0200000A:C351 01 00000000:00000000 00:00000000 00000000  1000        0 14 1 0
   4: 0100007F:1F40 0300000A:C352 06 00000000:00000000 03:00000000 00000000     0        0 0 3 0
"""


def test_only_established_connections_are_read_with_their_ports() -> None:
    assert list(parse(TABLE)) == [
        Connection(8000, 50_000, 12),
        Connection(50_000, 8000, 13),
        Connection(8000, 50_001, 14),
    ]


def test_ones_own_connections_are_no_callers() -> None:
    connections = list(parse(TABLE))
    assert count_callers(connections, 8000, set()) == 2
    assert count_callers(connections, 8000, {13}) == 1
    assert count_callers(connections, 8001, set()) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_a_real_servers_own_process_counts_not_as_a_caller(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        url = f"http://{host}:{port}" if family == socket.AF_INET else f"http://[{host}]:{port}"
        with socket.create_connection((host, port)) as client, server.accept()[0]:
            assert callers(url) == 0
            assert client.getpeername()[1] == port
        assert callers(url) == 0


def test_of_a_server_elsewhere_nothing_is_known() -> None:
    assert callers("http://192.0.2.1:8000") is None
