"""Which ports each Pod gets: all Pods share this machine's loopback, so each has a block of its own.

Seconds lie between the choice of a port and a server that listens there, and all the while it looks free to
whoever else starts a cluster. So what is chosen is claimed by the name of an abstract socket: such names
reach as far as ports do (all users of one network namespace), leave no file, and end however their holder
dies.
"""

from __future__ import annotations

import errno
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Self

from mooncakectl.local.errors import LocalRuntimeError

BLOCK_PORTS = 10
# Below the kernel's ephemeral range (from 32768), so that no outgoing connection takes one of them.
FIRST_PORT = 20_000
BLOCKS = 1_200
_PORTS = range(FIRST_PORT, FIRST_PORT + BLOCKS * BLOCK_PORTS)


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
    """Gives each Pod a block of 10 ports, the same one each time as far as it is free.

    A context manager: until it is left, no other one is given these blocks, in whichever process it is.
    """

    def __init__(self, cluster: str, *, is_free: Callable[[int], bool] = loopback_port_is_free) -> None:
        """Prepare.

        Args:
            cluster: its name spreads several clusters of one machine over the range.
            is_free: whether a server could listen on a port.
        """
        self._cluster = cluster
        self._is_free = is_free
        self._bases: dict[str, int] = {}
        self._claims = ExitStack()

    def __enter__(self) -> Self:
        """Nothing is claimed yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claims.close()
        self._bases.clear()

    def base(self, pod: str) -> int:
        """First port of the Pod's block.

        Raises:
            LocalRuntimeError: every block has a taken port, or no port can be claimed on this machine.
        """
        if pod not in self._bases:
            self._bases[pod] = self._first_free(pod)
        return self._bases[pod]

    def _first_free(self, pod: str) -> int:
        wanted = zlib.crc32(f"{self._cluster}/{pod}".encode()) % BLOCKS
        for step in range(BLOCKS):
            base = FIRST_PORT + (wanted + step) % BLOCKS * BLOCK_PORTS
            if self._take(base):
                return base
        raise LocalRuntimeError(
            f"no 10 free ports in a row between {_PORTS[0]} and {_PORTS[-1]} for Pod {pod}: "
            "end what listens there"
        )

    def _take(self, base: int) -> bool:
        with ExitStack() as taken:
            try:
                taken.enter_context(_claim(_block_of(base)))
            except OSError:
                return False
            if not all(map(self._is_free, range(base, base + BLOCK_PORTS))):
                return False
            self._claims.push(taken.pop_all())
        return True


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
        LocalRuntimeError: as `first_free_port`, or no port can be claimed on this machine.
    """
    with ExitStack() as kept:

        def take(port: int) -> bool:
            try:
                kept.enter_context(_keeper(port))
            except OSError:
                return False
            return True

        yield first_free_port(wanted, tries, is_free=take)


def _keeper(port: int) -> ExitStack:
    """A socket that keeps the port, and the claim on it; OSError when it is somebody's."""
    with ExitStack() as kept:
        # Two keepers may bind one port until either forbids it: the claim lets only one of them try.
        kept.enter_context(_claim(f"port {port}"))
        # A block's ports are its holder's before anybody listens there. Once kept, the port looks taken to
        # all that look for a block.
        with _claim(_block_of(port)) if port in _PORTS else nullcontext():
            keeper = kept.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # As a server's, the bind must not mind connections in TIME_WAIT.
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(("127.0.0.1", port))
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return kept.pop_all()


def _block_of(port: int) -> str:
    base = port - port % BLOCK_PORTS
    return f"ports {base}-{base + BLOCK_PORTS - 1}"


def _claim(what: str) -> socket.socket:
    """What one process of this machine holds at a time, until it closes it; OSError when another holds it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0mooncake {what}")
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            raise
        raise LocalRuntimeError(
            f"cannot claim {what} of this machine by an abstract socket: {error.strerror}"
        ) from error
    return claim
