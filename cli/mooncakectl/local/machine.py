"""Starts processes on this machine and ends them with all that they started."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mooncakectl.local.containers import ContainerSpec
from mooncakectl.local.folders import Folders
from mooncakectl.local.procfs import ProcessIdentity, kill_all, read_stat, signal_exactly
from mooncakectl.local.records import RUN_VARIABLE

_LAUNCHER = str(Path(__file__).with_name("launch.py"))
# A container starts from an empty environment; these are what a program needs to run on this machine at all.
# Proxy settings are left out on purpose: all traffic is on the loopback.
_KEPT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
_LONGEST_LOG_BYTES = 16 << 20
_LOOKED_AT_BYTES = 4096
_LONGEST_LINE = 300
_HEADLINE_BEGINS = "--- "


class Child:
    """A process in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log_problem: str = "") -> None:
        """Take over a process that was just started as a session's leader.

        Args:
            process: the process.
            log_problem: why its log cannot be written; empty where it can.
        """
        self.log_problem = log_problem
        self._process = process
        stat = read_stat(process.pid)
        self.identity = stat.identity if stat else ProcessIdentity(process.pid, 0)
        self._ended = asyncio.create_task(process.wait())

    @property
    def has_ended(self) -> bool:
        """Whether the process itself is gone; its children may live on until `sweep`."""
        return self._ended.done()

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code (negative = the signal that ended it), or None after `timeout_s`."""
        done, _ = await asyncio.wait({self._ended}, timeout=timeout_s)
        return self._ended.result() if done else None

    def terminate(self) -> None:
        """Ask the process to end, as the kubelet does: the main process only, which tells its children."""
        if not self.has_ended:
            signal_exactly(self.identity, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and everything in its session now."""
        if not self.has_ended:
            # First the leader: while it is not reaped, its session's number cannot become somebody else's.
            signal_exactly(self.identity, signal.SIGKILL)
        self.sweep()

    def sweep(self) -> None:
        """End what the process started and left running, as the end of a PID namespace would."""
        kill_all(lambda stat: stat.session == self.identity.pid)


class Machine:
    """The machine a run uses: environment, logs and the list of processes that are alive."""

    def __init__(
        self, folders: Folders, run_id: str, *, on_processes: Callable[[], None] = lambda: None
    ) -> None:
        """Use the folders of a cluster.

        Args:
            folders: where logs go.
            run_id: marks every process of this run.
            on_processes: called after each change of `processes`, before the new process matters to anyone.
        """
        self._folders = folders
        self._base = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._base |= {RUN_VARIABLE: run_id, "PYTHONUNBUFFERED": "1"}
        self._on_processes = on_processes
        self.processes: dict[ProcessIdentity, ContainerSpec] = {}

    async def start(self, spec: ContainerSpec, argv: Sequence[str] | None = None) -> Child:
        """Start a container's process, or another command in its environment (hook, probe).

        Its output goes to the end of the container's log.

        Raises:
            OSError: no process could be made, or the working directory is missing.
        """
        log = self._folders.log(spec.pod, spec.name)
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log_problem = ""
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if argv is None:
                try:
                    os.write(descriptor, _headline(spec.argv))
                except OSError as error:  # A full disk; what it keeps from running, it does by itself.
                    log_problem = f"{log}: {error.strerror}"
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *(argv or spec.argv)),
                env=self._environment(spec.env),
                cwd=spec.working_dir or self._folders.pod(spec.pod),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        child = Child(process, log_problem)
        self.processes[child.identity] = spec
        self._on_processes()
        return child

    def last_line(self, spec: ContainerSpec) -> str:
        """The end of a container's log: what a program that gives up says last; empty when nothing."""
        try:
            with self._folders.log(spec.pod, spec.name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOOKED_AT_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return "" if last.startswith(_HEADLINE_BEGINS) else last[:_LONGEST_LINE]

    def forget(self, child: Child) -> None:
        """Take a process that has ended off the list, with what it left running."""
        child.sweep()
        if self.processes.pop(child.identity, None) is not None:
            self._on_processes()

    async def run(self, spec: ContainerSpec, argv: Sequence[str], timeout_s: float) -> int | None:
        """Run a command beside a container to its end; None when it had to be killed after `timeout_s`."""
        child = await self.start(spec, argv)
        try:
            return await child.wait(timeout_s)
        finally:
            child.kill()
            self.forget(child)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        # What the Pod says wins, but not over the mark by which its processes are found again.
        return {**self._base, **env, RUN_VARIABLE: self._base[RUN_VARIABLE]}

    def keep_logs_of_last_run(self) -> None:
        """Move the logs that are there aside, one generation deep."""
        for log in self._folders.logs.glob("*/*.log"):
            log.replace(log.with_suffix(".log.previous"))

    def bound_logs(self, longest_bytes: int = _LONGEST_LOG_BYTES) -> None:
        """Cut logs that grew too long, keeping the part before in `*.log.1`.

        The processes hold the files open for appending, so the file is copied and emptied, not renamed. Lines
        written between the two are lost, and all of them where the disk has no room for a copy.
        """
        for log in self._folders.logs.glob("*/*.log"):
            if log.stat().st_size > longest_bytes:
                kept = log.with_suffix(".log.1")
                try:
                    shutil.copyfile(log, kept)
                except OSError:
                    kept.unlink(missing_ok=True)
                os.truncate(log, 0)


def _headline(argv: Sequence[str]) -> bytes:
    # Only what runs, not its arguments: they may be long, and secret.
    program = " ".join(argv[1:3]) if argv[1:2] == ("-m",) else Path(argv[0]).name
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return f"{_HEADLINE_BEGINS}{now} mooncakectl starts {program}\n".encode()
