"""Ports for processes under test that nobody else is given meanwhile.

A port that the kernel calls free may become the near end of somebody's connection before a process listens
there, or be told to two tests that run side by side. These lie below the range from which connections take
theirs, and below that of `mooncakectl up`; a claim on each is held, as the name of an abstract socket, by the
process of the tests: long enough for what was meant to listen there to do so.
"""

from __future__ import annotations

import errno
import random
import resource
import socket
from collections import deque

_LOWEST, _HIGHEST = 10_000, 20_000
# Where a process may have 1 024 files open, the tests' own need some too.
_MOST_CLAIMS = min(2_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
_claims: deque[socket.socket] = deque()


def free_port() -> int:
    """A TCP port of the loopback interface."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many neighbouring TCP ports of the loopback interface."""
    while True:
        base = random.randrange(_LOWEST, _HIGHEST - count)
        claims = [claim for n in range(count) if (claim := _claim(base + n)) is not None]
        if len(claims) == count:
            _claims.extend(claims)
            while len(_claims) > _MOST_CLAIMS:
                _claims.popleft().close()
            return base
        for claim in claims:
            claim.close()


def _claim(port: int) -> socket.socket | None:
    """A claim on a port; None when somebody has it, or listens there without."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0mooncake-test-port-{port}")
        with socket.socket() as probe:
            # Servers set it too: connections in TIME_WAIT must not make a port look taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim
