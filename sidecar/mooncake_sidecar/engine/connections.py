"""Who is connected to a port of this Pod: the last thing that tells whether an engine works.

An engine that tells no metrics, with no sidecar or no Redis beside it, can still be seen to be in use:
whoever waits for an answer holds a connection. The kernel lists them (proc_pid_net(5), `/proc/net/tcp`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Connection(NamedTuple):
    """One end of an established connection."""

    local_port: int
    remote_port: int
    inode: int


def callers(url: str) -> int | None:
    """How many others are connected to a server of this network namespace.

    Args:
        url: the server's.

    Returns:
        Connections that do not come from this very process; None where the kernel does not tell, or where the
        server is not on this side of the network.
    """
    address = urlsplit(url)
    if address.hostname not in _LOOPBACK or address.port is None:
        return None
    try:
        tables = [Path(table).read_text() for table in _TABLES if os.path.exists(table)]
    except OSError:
        return None
    if not tables:
        return None
    return count_callers([each for table in tables for each in parse(table)], address.port, _own_inodes())


def count_callers(connections: Iterable[Connection], port: int, own_inodes: set[int]) -> int:
    """Connections to a local port, without those whose other end is one of one's own sockets."""
    connections = list(connections)
    own_ports = {one.local_port for one in connections if one.remote_port == port and one.inode in own_inodes}
    return sum(one.local_port == port and one.remote_port not in own_ports for one in connections)


def parse(table: str) -> Iterator[Connection]:
    """The established connections of a table as the kernel writes it."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _ESTABLISHED:
            yield Connection(_port(fields[1]), _port(fields[2]), int(fields[9]))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _own_inodes() -> set[int]:
    inodes = set()
    for file in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{file}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes
