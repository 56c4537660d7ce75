"""What a runtime writes down, so that the next one can end what a killed one left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
from types import TracebackType
from typing import Self

import msgspec

from mooncakectl.local.errors import LocalRuntimeError
from mooncakectl.local.folders import Folders
from mooncakectl.local.procfs import ProcessIdentity, ProcessStat, boot_id, kill_all, read_stat, started_with

RUN_VARIABLE = "MOONCAKE_LOCAL_RUN"
"""Every process of a run carries this variable, and so do the processes that they start."""


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process of a container."""

    identity: ProcessIdentity
    pod: str
    container: str


class RunRecord(msgspec.Struct, kw_only=True):
    """One run of a local cluster."""

    run_id: str
    boot_id: str
    cluster: str
    runtime: ProcessIdentity
    run_folder: str
    started_at: str
    endpoint: str = ""
    """Base URL of the OpenAI server."""
    admin_urls: list[str] = msgspec.field(default_factory=list)
    """Base URL of each scheduler's admin port."""
    processes: list[ProcessRecord] = msgspec.field(default_factory=list)


class RecordFile:
    """`state.json` of a cluster; replaced as a whole, so that a kill leaves the old or the new one."""

    def __init__(self, folders: Folders) -> None:
        """Name the file; it need not be there."""
        self.path = folders.state / "state.json"

    def load(self) -> RunRecord | None:
        """The record of the last run that did not end cleanly, or of the one that runs."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=RunRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def save(self, record: RunRecord) -> None:
        """Write the record."""
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        fresh.replace(self.path)

    def remove(self) -> None:
        """Say that nothing runs."""
        self.path.unlink(missing_ok=True)


class ClusterLock:
    """Held while a runtime runs a cluster; the kernel lets go of it however the runtime dies."""

    def __init__(self, folders: Folders) -> None:
        """Name the lock; entering takes it."""
        self._folders = folders
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            LocalRuntimeError: another runtime holds it.
        """
        descriptor = os.open(self._folders.state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise LocalRuntimeError(_already_up(self._folders)) from None
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_up(folders: Folders) -> bool:
    """Whether a runtime holds the cluster's lock now."""
    try:
        descriptor = os.open(folders.state / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _already_up(folders: Folders) -> str:
    record = RecordFile(folders).load()
    if record is None:
        return f"cluster {folders.cluster} is being started by another mooncakectl"
    return (
        f"cluster {folders.cluster} is already up at {record.endpoint or 'an unknown port'} (process "
        f"{record.runtime.pid}, since {record.started_at}): stop that one first, or change metadata.name"
    )


def end_leftovers(record: RunRecord) -> int:
    """End what still runs of a run, and remove its volumes; returns how many processes were ended.

    A process counts as left behind when it is a recorded one (number and start time both), is in the session
    of a recorded one, or was started with the run's id in its environment. Anything else is foreign.
    """
    ended = 0
    if record.boot_id == boot_id():
        sessions = {process.identity.pid for process in record.processes if _leads_still(process.identity)}

        def is_left_behind(stat: ProcessStat) -> bool:
            in_session = stat.session in sessions
            return in_session or started_with(stat.identity.pid, RUN_VARIABLE, record.run_id)

        ended = kill_all(is_left_behind)
    shutil.rmtree(record.run_folder, ignore_errors=True)
    return ended


def _leads_still(identity: ProcessIdentity) -> bool:
    stat = read_stat(identity.pid)
    return stat is not None and stat.identity == identity
