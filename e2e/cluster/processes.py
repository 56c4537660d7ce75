"""Starting a cluster's processes so that they outlive their starter, and finding them again."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from e2e.cluster import network
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def spawn(
    layout: Layout,
    name: str,
    command: Sequence[str | Path],
    *,
    on_host: bool = False,
    inherited: Sequence[int] = (),
) -> "Spawned":
    """Start a process of the cluster; its output goes to ``logs/<name>.log``.

    Args:
        layout: the cluster.
        name: of the log, for messages.
        command: what to run.
        on_host: run in the host's network instead of the cluster's.
        inherited: descriptors that it gets, under the same numbers.
    """
    layout.logs.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    # containerd looks for its shim in PATH, beside itself.
    path = f"{Path(words[0]).parent}:{_PATH}"
    with (layout.logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            words if on_host else network.inside(layout, words),
            env={"PATH": path, "HOME": str(layout.state), **layout.marker},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
        )
    process.returncode = 0  # it is meant to outlive this process, and not to be reported as forgotten
    return Spawned(layout, name, process.pid)


def wait_until(
    what: str, holds: Callable[[], bool], deadline_s: float, watched: Iterable["Spawned"] = ()
) -> None:
    """Poll until something holds.

    Raises:
        ClusterError: the deadline passed or a watched process ended; the message has the end of its log.
    """
    end = time.monotonic() + deadline_s
    while not holds():
        for process in watched:
            process.must_run()
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(0.1)


class Spawned:
    """A process that was just started."""

    def __init__(self, layout: Layout, name: str, pid: int) -> None:
        self.name = name
        self._pid = pid
        self._log = layout.logs / f"{name}.log"

    def must_run(self) -> None:
        """Raise where it has ended, with the end of its log."""
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            raise ClusterError(f"{self.name} ended with {code}; the end of its log:\n{tail(self._log)}")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, or a remark that there are none."""
    if not log.exists():
        return f"(no {log})"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def of_cluster(layout: Layout) -> dict[int, str]:
    """Process id → command line of everything alive that is marked as the cluster's.

    What runs in containers has the environment of its Pod and is found by cgroup instead.
    """
    ((key, value),) = layout.marker.items()
    wanted = f"{key}={value}".encode()
    own = set(_self_and_ancestors())
    found = {}
    for pid in _pids():
        with suppress(OSError):
            if pid not in own and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def end(pids: Callable[[], Iterable[int]], patience_s: float = 2.0) -> None:
    """Ask processes to end, and kill those that have not after a while.

    Args:
        pids: says which are alive, asked again until there are none.
        patience_s: seconds between SIGTERM and SIGKILL.

    Raises:
        ClusterError: some survive even SIGKILL.
    """
    _send(pids(), signal.SIGTERM)
    patience_end = time.monotonic() + patience_s
    while alive := set(pids()):
        _reap(alive)
        if time.monotonic() > patience_end:
            _send(alive, signal.SIGKILL)
        if time.monotonic() > patience_end + 15:
            raise ClusterError(f"processes {sorted(alive)} do not end")
        time.sleep(0.05)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is more than an unreaped entry in the table."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and is_alive(int(entry)))


def _self_and_ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid > 0:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
