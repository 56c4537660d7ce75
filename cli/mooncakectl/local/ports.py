"""Which ports each Pod gets: all Pods share this machine's loopback, so each has a block of its own."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mooncakectl.local.errors import LocalRuntimeError

BLOCK_PORTS = 10
# Below the kernel's ephemeral range (from 32768), so that no outgoing connection takes one of them.
FIRST_PORT = 20_000
BLOCKS = 1_200


def loopback_port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set it too: connections in TIME_WAIT must not make a port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


class PortBlocks:
    """Gives each Pod a block of 10 ports, the same one each time as far as it is free."""

    def __init__(
        self,
        cluster: str,
        *,
        reserved: Iterable[int] = (),
        is_free: Callable[[int], bool] = loopback_port_is_free,
    ) -> None:
        """Prepare.

        Args:
            cluster: its name spreads several clusters of one machine over the range.
            reserved: ports that no block may contain.
            is_free: whether a server could listen on a port.
        """
        self._cluster = cluster
        self._reserved = frozenset(reserved)
        self._is_free = is_free
        self._bases: dict[str, int] = {}

    @property
    def bases(self) -> dict[str, int]:
        """The first port of each Pod's block so far."""
        return dict(self._bases)

    def base(self, pod: str) -> int:
        """First port of the Pod's block.

        Raises:
            LocalRuntimeError: every block has a taken port.
        """
        if pod not in self._bases:
            self._bases[pod] = self._first_free(pod)
        return self._bases[pod]

    def _first_free(self, pod: str) -> int:
        wanted = zlib.crc32(f"{self._cluster}/{pod}".encode()) % BLOCKS
        taken = set(self._bases.values())
        for step in range(BLOCKS):
            base = FIRST_PORT + (wanted + step) % BLOCKS * BLOCK_PORTS
            ports = range(base, base + BLOCK_PORTS)
            if base not in taken and self._reserved.isdisjoint(ports) and all(map(self._is_free, ports)):
                return base
        last = FIRST_PORT + BLOCKS * BLOCK_PORTS - 1
        raise LocalRuntimeError(
            f"no 10 free ports in a row between {FIRST_PORT} and {last} for Pod {pod}: end what listens there"
        )


def first_free_port(
    wanted: int, tries: int = 100, *, is_free: Callable[[int], bool] = loopback_port_is_free
) -> int:
    """The wanted port, or the next free one above it.

    Raises:
        LocalRuntimeError: none of them is free.
    """
    candidates = range(wanted, min(wanted + tries, 65_536))
    for port in candidates:
        if is_free(port):
            return port
    taken = f"ports {wanted} to {candidates[-1]} are all" if len(candidates) > 1 else f"port {wanted} is"
    raise LocalRuntimeError(f"{taken} taken, or not yours to use: choose another one with --port")


@contextmanager
def held_port(wanted: int, tries: int = 100) -> Iterator[int]:
    """The wanted port or the next free one, kept for the servers of this user that share it by SO_REUSEPORT.

    They may bind it; whoever else looks for a free port finds it taken, also before one of them listens. The
    socket itself never listens, so no connection goes to it.

    Raises:
        LocalRuntimeError: as `first_free_port`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as keeper:

        def take(port: int) -> bool:
            # As a server's, the bind must not mind connections in TIME_WAIT.
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                keeper.bind(("127.0.0.1", port))
            except OSError:
                return False
            # Only now may others share it: two that came at once would else both have it.
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return True

        yield first_free_port(wanted, tries, is_free=take)
