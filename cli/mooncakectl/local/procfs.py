"""Processes as the kernel shows them: who they are beyond a reusable number, and how to end exactly them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

_DYING_S = 0.005
"""What the kernel is given to take a killed process down before it is looked for again."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process for good: numbers are used again, a number with its start is not (within one boot)."""

    pid: int
    start_ticks: int
    """When it started, in clock ticks since boot (`/proc/<pid>/stat`, field 22)."""


class ProcessStat(msgspec.Struct, frozen=True):
    """What of `/proc/<pid>/stat` matters here."""

    identity: ProcessIdentity
    session: int
    is_zombie: bool


def boot_id() -> str:
    """Differs after each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_stat(pid: int) -> ProcessStat | None:
    """The process with this number now; None when there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything: parentheses, blanks, half a letter.
    fields = line[line.rindex(b")") + 2 :].split()
    return ProcessStat(
        identity=ProcessIdentity(pid=pid, start_ticks=int(fields[19])),
        session=int(fields[3]),
        is_zombie=fields[0] in (b"Z", b"X"),
    )


def is_running(identity: ProcessIdentity) -> bool:
    """Whether that very process still runs."""
    stat = read_stat(identity.pid)
    return stat is not None and stat.identity == identity and not stat.is_zombie


def running_processes() -> Iterator[ProcessStat]:
    """All processes that can be seen, without zombies."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := read_stat(int(entry))) is not None and not stat.is_zombie:
            yield stat


def started_with(pid: int, variable: str, value: str) -> bool:
    """Whether a process of this user was started with an environment variable set so."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{variable}={value}".encode() in environ.split(b"\0")


def signal_exactly(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal that process and never another one that got its number; False when it is gone."""
    try:
        handle = os.pidfd_open(identity.pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        # The handle holds on to one process: if it is ours now, it is ours when the signal arrives.
        if not is_running(identity):
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def kill_all(is_target: Callable[[ProcessStat], bool], rounds: int = 20) -> int:
    """SIGKILL every process that matches, and those they fork meanwhile; returns how many there were."""
    own = os.getpid()
    seen: set[ProcessIdentity] = set()
    for _ in range(rounds):
        found = {s.identity for s in running_processes() if s.identity.pid != own and is_target(s)}
        if not found:
            break
        seen |= {identity for identity in found if signal_exactly(identity, signal.SIGKILL)}
        time.sleep(_DYING_S)
    return len(seen)
