"""Locks between processes: files that one of them holds."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from e2e.cluster.errors import ClusterError

_WITHIN_S = 3.0


@contextmanager
def alone(path: Path, refusal: str) -> Iterator[None]:
    """Hold a file that nobody else holds meanwhile; the kernel lets go when the holder dies.

    Raises:
        ClusterError: somebody else holds it; `refusal` says so.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        # What a holder was just starting when it was killed has the lock until it is its own program.
        deadline = time.monotonic() + _WITHIN_S
        while not _taken(lock):
            if time.monotonic() > deadline:
                raise ClusterError(refusal)
            time.sleep(0.05)
        yield


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
