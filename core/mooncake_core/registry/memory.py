"""The registry of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from mooncake_core.registry.contract import EngineReport, Instance, InstanceState, StaleEpochError

HEARTBEAT_TTL_S = 5.0
"""A registration not kept alive for so long (wall seconds) has ended."""


@dataclass(slots=True)
class _Record:
    instance: Instance
    expires_s: float
    report: EngineReport | None = None


class MemoryRegistry:
    """Instances that announce themselves inside this process. Satisfies `Registry`.

    Args:
        ttl_s: Wall seconds that a registration lives without a heartbeat; None = until it is deregistered.
        clock: Wall seconds that never go back.
    """

    def __init__(
        self, ttl_s: float | None = HEARTBEAT_TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = float("inf") if ttl_s is None else ttl_s
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._epochs: dict[str, int] = {}

    async def register(self, instance: Instance, *, resume_epoch: int = 0) -> Instance:
        known = self._epochs.get(instance.id, 0)
        epoch = (
            resume_epoch if resume_epoch and known in (0, resume_epoch) else max(known, instance.epoch) + 1
        )
        self._epochs[instance.id] = epoch
        registered = msgspec.structs.replace(instance, epoch=epoch)
        self._records[instance.id] = _Record(registered, self._clock() + self._ttl_s)
        return registered

    async def join(self, instance: Instance) -> Instance:
        self._reap()
        record = self._records.get(instance.id)
        return await self.register(instance) if record is None else record.instance

    async def heartbeat(
        self, instance_id: str, epoch: int, report: EngineReport | None = None
    ) -> InstanceState:
        self._reap()
        record = self._records.get(instance_id)
        if record is None or record.instance.epoch != epoch:
            raise StaleEpochError(f"{instance_id}: epoch {epoch} is not the registered one")
        record.expires_s = self._clock() + self._ttl_s
        if report is not None:
            record.report = report
        return record.instance.state

    async def deregister(self, instance_id: str, epoch: int) -> None:
        record = self._records.get(instance_id)
        if record is not None and record.instance.epoch == epoch:
            del self._records[instance_id]

    async def mark(self, instance_id: str, state: InstanceState) -> bool:
        self._reap()
        record = self._records.get(instance_id)
        if record is None:
            return False
        record.instance = msgspec.structs.replace(record.instance, state=state)
        return True

    async def instances(self) -> Sequence[Instance]:
        self._reap()
        return [self._records[instance_id].instance for instance_id in sorted(self._records)]

    async def reports(self) -> dict[str, EngineReport]:
        self._reap()
        return {
            instance_id: record.report
            for instance_id, record in self._records.items()
            if record.report is not None
        }

    def _reap(self) -> None:
        now_s = self._clock()
        for instance_id in [i for i, record in self._records.items() if record.expires_s < now_s]:
            del self._records[instance_id]
