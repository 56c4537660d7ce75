"""Runs one Pod: its volumes, its init containers in order, then its containers side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mooncakectl.local.changes import Changes
from mooncakectl.local.containers import ContainerKind, PodSpec
from mooncakectl.local.folders import Folders
from mooncakectl.local.machine import Machine
from mooncakectl.local.probing import Prober
from mooncakectl.local.supervision import ContainerStatus, ContainerSupervisor, EventSink, Phase
from mooncakectl.local.volumes import write_volume


@dataclass(frozen=True, slots=True)
class PodStatus:
    """What is known of a Pod now."""

    name: str
    labels: dict[str, str]
    ready: bool
    restarts: int
    containers: tuple[ContainerStatus, ...]

    @property
    def message(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.ready:
            return ""
        for container in self.containers:
            if not container.ready and container.message:
                return f"{container.name}: {container.message}"
        return "starting"


class PodSupervisor:
    """Runs a Pod until it is stopped."""

    def __init__(
        self,
        spec: PodSpec,
        folders: Folders,
        machine: Machine,
        prober: Prober,
        *,
        on_event: EventSink,
        changes: Changes,
    ) -> None:
        """Prepare; `start` starts. See `ContainerSupervisor` for the arguments."""
        self.spec = spec
        self._folders = folders
        self._changes = changes
        self._containers = {
            container.name: ContainerSupervisor(
                container, machine, prober, grace_s=spec.grace_s, on_event=on_event, changes=changes
            )
            for container in spec.containers
        }
        self._on_event = on_event
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin; the task ends when every container has been started, or something prevented it."""
        self._starting = asyncio.create_task(self._start_told(), name=self.spec.name)
        return self._starting

    @property
    def status(self) -> PodStatus:
        """A snapshot."""
        lasting = [c for c in self.spec.containers if c.kind is not ContainerKind.INIT]
        statuses = [self._containers[c.name].status for c in self.spec.containers]
        return PodStatus(
            name=self.spec.name,
            labels=dict(self.spec.labels),
            ready=all(self._containers[c.name].status.ready for c in lasting),
            restarts=sum(status.restarts for status in statuses),
            containers=tuple(statuses),
        )

    async def stop(self) -> None:
        """End the containers as the kubelet does: main ones together, then sidecars, the last one first."""
        await self._stop_starting()
        await self._stop_all(self._supervisors(ContainerKind.INIT))
        await self._stop_all(self._supervisors(ContainerKind.MAIN))
        for sidecar in reversed(self._supervisors(ContainerKind.SIDECAR)):
            await sidecar.stop()

    def kill(self) -> None:
        """End every container now; a `stop` that waits returns."""
        for supervisor in self._containers.values():
            supervisor.kill()

    def crash(self, container: str) -> None:
        """Kill one container's process as it is; the restart policy decides what follows."""
        self._containers[container].crash()

    async def _start_told(self) -> None:
        try:
            await self._start()
        except OSError as error:
            # A full disk, a folder that is not there: the Pod stays as it is, and says why.
            problem = f"could not be started: {error.filename or self.spec.name}: {error.strerror or error}"
            for container in self.spec.containers:
                self._containers[container.name].status.message = problem
            self._on_event(self.spec.name, self.spec.containers[0].name, problem)
            self._changes.notify()

    async def _start(self) -> None:
        for volume in self.spec.volumes:
            if volume.host_path is None:
                write_volume(volume, self._folders.pod(self.spec.name) / volume.name)
        for container in self.spec.containers:
            supervisor = self._containers[container.name]
            match container.kind:
                case ContainerKind.INIT:
                    await asyncio.shield(supervisor.start())
                    if supervisor.status.phase is Phase.FAILED:
                        return
                case ContainerKind.SIDECAR:
                    supervisor.start()
                    while not supervisor.status.started:
                        await self._changes.wait()
                case ContainerKind.MAIN:
                    supervisor.start()

    async def _stop_starting(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    async def _stop_all(self, supervisors: Sequence[ContainerSupervisor]) -> None:
        await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))

    def _supervisors(self, kind: ContainerKind) -> list[ContainerSupervisor]:
        return [self._containers[container.name] for container in self.spec.of_kind(kind)]
