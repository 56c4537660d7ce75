"""The local runtime: one cluster's Pods as processes, from the first start to nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mooncakectl.local.changes import Changes
from mooncakectl.local.containers import PodSpec, pod_spec
from mooncakectl.local.errors import LocalRuntimeError
from mooncakectl.local.folders import Folders
from mooncakectl.local.instances import InstanceSupervisor, instances_of_several_pods
from mooncakectl.local.machine import Machine
from mooncakectl.local.pods import PodStatus, PodSupervisor
from mooncakectl.local.probing import Prober
from mooncakectl.local.procfs import boot_id, read_stat
from mooncakectl.local.programs import Programs
from mooncakectl.local.records import ClusterLock, ProcessRecord, RecordFile, RunRecord, end_leftovers
from mooncakectl.local.supervision import EventSink
from mooncakectl.local.volumes import Volume, volumes_of
from mooncakectl.local.world import Manifest, World

__all__ = ["LocalRuntime", "PodStatus", "resolve_pods"]

_LOG_CHECK_S = 10.0


def resolve_pods(world: World, folders: Folders, programs: Programs | None = None) -> list[PodSpec]:
    """Work out every process of a world before the first one starts, so that a mistake starts none.

    Raises:
        LocalRuntimeError: a Pod cannot run here; names the field.
    """
    program = (programs or Programs()).resolve
    return [_resolve_pod(pod, world, folders, program) for pod in world.pods]


def _resolve_pod(pod: Manifest, world: World, folders: Folders, program: Callable[[str], str]) -> PodSpec:
    pod_folder = folders.pod(pod["metadata"]["name"])

    def folder_of(volume: Volume) -> str:
        return volume.host_path or str(pod_folder / volume.name)

    return pod_spec(pod, world, volumes=volumes_of(pod, world), folder_of=folder_of, program=program)


class LocalRuntime:
    """Runs the Pods of one cluster; an async context manager that leaves no process behind.

    To be entered in the main thread: the kernel ends the children when the thread that started them ends.
    """

    def __init__(self, folders: Folders, *, on_event: EventSink = lambda pod, container, line: None) -> None:
        """Prepare to run a cluster.

        Args:
            folders: where it keeps its things.
            on_event: told of starts, restarts and failed probes.
        """
        self.folders = folders
        self.changes = Changes()
        self.leftovers_ended = 0
        """How many processes of an earlier run, whose runtime was killed, had to be ended."""
        self._on_event = on_event
        self._lock = ClusterLock(folders)
        self._file = RecordFile(folders)
        self._pods: dict[str, PodSupervisor] = {}
        self._instances: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Take the cluster's lock, and end what a killed runtime left.

        Raises:
            LocalRuntimeError: the cluster is already up, or its folders cannot be made.
        """
        self.folders.make()
        self._lock.__enter__()
        try:
            self._begin()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        self._tasks.add(asyncio.create_task(self._bound_logs()))
        return self

    def _begin(self) -> None:
        if (earlier := self._file.load()) is not None:
            self.leftovers_ended = end_leftovers(earlier)
            self.folders.make()
        own = read_stat(os.getpid())
        assert own is not None
        self._record = RunRecord(
            run_id=uuid.uuid4().hex,
            boot_id=boot_id(),
            cluster=self.folders.cluster,
            runtime=own.identity,
            run_folder=str(self.folders.run),
            started_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        )
        self._file.save(self._record)
        self._machine = Machine(self.folders, self._record.run_id, on_processes=self._save_processes)
        self._machine.keep_logs_of_last_run()
        self._prober = Prober(self._machine)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        await self._leave_instances_alone()
        await asyncio.gather(*(pod.stop() for pod in self._pods.values()), return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._prober.close()
        # Also ends what left its container's session (daemons), and removes the volumes with their Secrets.
        end_leftovers(self._record)
        self._file.remove()
        self._lock.__exit__(kind, error, trace)

    def announce(self, *, endpoint: str, admin_urls: Sequence[str] = ()) -> None:
        """Write down where the cluster answers, for `mooncakectl status` in another terminal."""
        self._record.endpoint, self._record.admin_urls = endpoint, list(admin_urls)
        self._file.save(self._record)

    def start(self, world: World, programs: Programs | None = None) -> None:
        """Start all Pods at once, as Kubernetes does; who needs whom is settled by readiness.

        Raises:
            LocalRuntimeError: a Pod cannot run on this machine. Nothing was started then.
        """
        specs = resolve_pods(world, self.folders, programs)
        for spec in specs:
            self._pods[spec.name] = self._start_pod(spec)
        for name, members in instances_of_several_pods(specs).items():
            instance = InstanceSupervisor(
                name, members, self._pods, self._start_pod, on_event=self._on_event, changes=self.changes
            )
            self._instances.append(asyncio.create_task(instance.watch(), name=name))

    def _start_pod(self, spec: PodSpec) -> PodSupervisor:
        pod = PodSupervisor(
            spec,
            self.folders,
            self._machine,
            self._prober,
            on_event=self._on_event,
            changes=self.changes,
        )
        self.folders.pod(spec.name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._tasks.add(pod.start())
        return pod

    def statuses(self) -> list[PodStatus]:
        """Every Pod, in the order of the world."""
        return [pod.status for pod in self._pods.values()]

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when every Pod is ready.

        Raises:
            LocalRuntimeError: after `timeout_s` some are not; says which, why, and where their logs are.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not all(status.ready for status in self.statuses()):
                    await self.changes.wait()
        except TimeoutError:
            waiting = [f"{s.name} ({s.message})" for s in self.statuses() if not s.ready]
            raise LocalRuntimeError(
                f"not ready after {timeout_s:g} s: {', '.join(waiting)}; logs are in {self.folders.logs}"
            ) from None

    async def stop(self, waves: Callable[[PodStatus], int] = lambda pod: 0) -> None:
        """Stop the Pods: hooks, SIGTERM, and SIGKILL after each one's grace period.

        Args:
            waves: Pods with a smaller number are gone before the next begin to stop.
        """
        await self._leave_instances_alone()
        numbers = {name: waves(pod.status) for name, pod in self._pods.items()}
        for wave in sorted(set(numbers.values())):
            await _stop_together([self._pods[name] for name, number in numbers.items() if number == wave])

    def kill(self) -> None:
        """End every process now; a `stop` that waits returns soon."""
        for task in self._instances:
            task.cancel()
        for pod in self._pods.values():
            pod.kill()

    def kill_container(self, pod: str, container: str) -> None:
        """End one container as a crash would (SIGKILL); it restarts by its Pod's policy."""
        self._pods[pod].crash(container)

    def log(self, pod: str, container: str) -> Path:
        """The log file of a container."""
        return self.folders.log(pod, container)

    async def _leave_instances_alone(self) -> None:
        """What ends from now on is meant to."""
        for task in self._instances:
            task.cancel()
        await asyncio.gather(*self._instances, return_exceptions=True)

    def _save_processes(self) -> None:
        self._record.processes = [
            ProcessRecord(identity=identity, pod=spec.pod, container=spec.name)
            for identity, spec in self._machine.processes.items()
        ]
        try:
            self._file.save(self._record)
        except OSError:
            # They carry the run's id in their environment too, by which the next run finds what is left.
            return

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            with contextlib.suppress(OSError):
                self._machine.bound_logs()


async def _stop_together(pods: Sequence[PodSupervisor]) -> None:
    await asyncio.gather(*(pod.stop() for pod in pods))
