"""The registry of a cluster without shared state: instances stand in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from mooncake_core.config.base import ConfigError
from mooncake_core.registry.contract import EngineReport, Instance, InstanceState

_log = structlog.get_logger(__name__)


class StaticRegistry:
    """Instances from a JSON list of `Instance`, read again when the file changes. Satisfies `Registry`.

    An instance has the epoch that the file gives, else one that this process counts: 1, and one more each
    time its record changes. Marks are kept in memory. A change of the file that cannot be used is reported
    and the last good list stays.

    Raises:
        ConfigError: the file cannot be used when the registry is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._written: dict[str, Instance] = {}
        self._epochs: dict[str, int] = {}
        self._marks: dict[str, InstanceState] = {}
        self._stamp = self._take_stamp()
        self._take(self._read())

    async def register(self, instance: Instance, *, resume_epoch: int = 0) -> Instance:
        """Not offered.

        Raises:
            ConfigError: always; the message names the file to edit.
        """
        raise ConfigError(f"{self._path}: instances stand in this file: add {instance.id} there")

    async def join(self, instance: Instance) -> Instance:
        """Not offered, like `register`."""
        return await self.register(instance)

    async def heartbeat(
        self, instance_id: str, epoch: int, report: EngineReport | None = None
    ) -> InstanceState:
        return self._marks.get(instance_id, InstanceState.READY)

    async def deregister(self, instance_id: str, epoch: int) -> None:
        """Nothing: only the file says who is there."""

    async def mark(self, instance_id: str, state: InstanceState) -> bool:
        self._refresh()
        if instance_id not in self._written:
            return False
        self._marks[instance_id] = state
        return True

    async def instances(self) -> Sequence[Instance]:
        self._refresh()
        return [self._current(self._written[instance_id]) for instance_id in sorted(self._written)]

    async def reports(self) -> dict[str, EngineReport]:
        return {}

    def _current(self, written: Instance) -> Instance:
        return msgspec.structs.replace(
            written,
            epoch=written.epoch or self._epochs[written.id],
            state=self._marks.get(written.id, written.state),
        )

    def _refresh(self) -> None:
        try:
            stamp = self._take_stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._take(self._read())
        except ConfigError as error:
            _log.error("the changed instances file is not used", error=str(error))

    def _take_stamp(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error
        # ConfigMap volumes swap a symbolic link, so size and time alone could stay the same.
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> list[Instance]:
        try:
            written = msgspec.json.decode(self._path.read_bytes(), type=list[Instance])
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}: {error}") from error
        ids = [instance.id for instance in written]
        for twice in {i for i in ids if ids.count(i) > 1}:
            raise ConfigError(f"{self._path}: the id {twice!r} stands there twice: ids are unique")
        return written

    def _take(self, written: list[Instance]) -> None:
        for instance in written:
            if self._written.get(instance.id) != instance:
                self._epochs[instance.id] = self._epochs.get(instance.id, 0) + 1
        self._written = {instance.id: instance for instance in written}
