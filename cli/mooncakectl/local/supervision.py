"""Keeps one container running: starts, probes, restarts, ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mooncakectl.local.backoff import RestartBackoff
from mooncakectl.local.changes import Changes
from mooncakectl.local.containers import ContainerKind, ContainerSpec, RestartPolicy
from mooncakectl.local.machine import Child, Machine
from mooncakectl.local.probes import ExecCommand, HttpGet, ProbeSpec, ProbeTracker, Sleep, Verdict
from mooncakectl.local.probing import Prober

# What the kubelet leaves a process after its preStop hook used up the grace period.
_LEAST_GRACE_S = 2.0

EventSink = Callable[[str, str, str], None]
"""Takes Pod, container and a line about it."""


class Phase(Enum):
    """Where a container is in its life."""

    WAITING = "Waiting"
    RUNNING = "Running"
    BACK_OFF = "CrashLoopBackOff"
    COMPLETED = "Completed"
    FAILED = "Failed"


@dataclass
class ContainerStatus:
    """What is known of a container now."""

    name: str
    phase: Phase = Phase.WAITING
    started: bool = False
    """Its startup probe has passed (or it has none and runs)."""
    ready: bool = False
    restarts: int = 0
    pid: int | None = None
    message: str = ""
    """Why it ended last, or why it is not ready."""


class ContainerSupervisor:
    """Runs one container until it is stopped or, by its restart policy, done."""

    def __init__(
        self,
        spec: ContainerSpec,
        machine: Machine,
        prober: Prober,
        *,
        grace_s: float,
        on_event: EventSink,
        changes: Changes | None = None,
        backoff: RestartBackoff | None = None,
    ) -> None:
        """Prepare; `start` starts.

        Args:
            spec: the container.
            machine: where its processes are started.
            prober: carries out its probes.
            grace_s: how long it may take to end, hook included.
            on_event: told what happens.
            changes: notified when `status` changes.
            backoff: its restarts, else Kubernetes-like.
        """
        self.spec = spec
        self.status = ContainerStatus(spec.name)
        self._machine = machine
        self._prober = prober
        self._grace_s = grace_s
        self._on_event = on_event
        self._changes = changes or Changes()
        self._backoff = backoff or RestartBackoff()
        self._stopping = asyncio.Event()
        self._child: Child | None = None
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin supervising; the task ends when the container is over for good."""
        self._task = asyncio.create_task(self._run(), name=f"{self.spec.pod}/{self.spec.name}")
        self._task.add_done_callback(self._report_fault)
        return self._task

    async def stop(self) -> None:
        """Hook, SIGTERM, and after the grace period SIGKILL; returns when nothing of the container runs."""
        self._stopping.set()
        if self._child is not None:
            await self._end_once(self._child, self._grace_s)
        if self._task is not None:
            await self._task

    def kill(self) -> None:
        """End it now; a `stop` that waits returns."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    def crash(self) -> None:
        """Kill the process as a fault would; it is restarted like after any other end."""
        if self._child is not None:
            self._child.kill()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._run_once()
            if self._stopping.is_set() or not self._restarts_after(code):
                self._update(phase=Phase.COMPLETED if code == 0 else Phase.FAILED)
                return
            delay_s = self._backoff.delay_s(loop.time() - began)
            self._event(f"{self.status.message}; restarts {f'in {delay_s:g} s' if delay_s else 'now'}")
            self._update(phase=Phase.BACK_OFF if delay_s else Phase.WAITING)
            await _set_within(self._stopping, delay_s)
            self.status.restarts += 1

    async def _run_once(self) -> int:
        try:
            child = await self._machine.start(self.spec)
        except OSError as error:
            self._update(message=f"could not be started: {error.strerror}")
            return 128
        if child.log_problem:
            self._event(f"its log cannot be written: {child.log_problem}")
        self._child = child
        self.status.pid = child.identity.pid
        self._update(phase=Phase.RUNNING)
        if self._stopping.is_set():  # `stop` came while the process was being made, and saw none.
            child.kill()
        probes = asyncio.create_task(self._probe(child))
        code = await child.wait()
        assert code is not None
        probes.cancel()
        outcome = (await asyncio.gather(probes, return_exceptions=True))[0]
        if self._ending is not None:
            await self._ending
        self._child = self._ending = self.status.pid = None
        self._machine.forget(child)
        reason = f"killed by signal {-code}" if code < 0 else f"exited with {code}"
        if code > 0 and (last := self._machine.last_line(self.spec)):
            reason += f": {last}"
        self._update(started=False, ready=False, message=reason)
        if isinstance(outcome, Exception):
            raise outcome
        return code

    def _restarts_after(self, code: int) -> bool:
        policy = self.spec.restart
        return policy is RestartPolicy.ALWAYS or (policy is RestartPolicy.ON_FAILURE and code != 0)

    async def _probe(self, child: Child) -> None:
        spec = self.spec
        if spec.startup is not None and not await self._probe_until_started(child, spec.startup):
            return
        self._update(started=True, ready=spec.readiness is None and spec.kind is not ContainerKind.INIT)
        async with asyncio.TaskGroup() as group:
            if spec.readiness is not None:
                group.create_task(self._watch_readiness(spec.readiness))
            if spec.liveness is not None:
                group.create_task(self._watch_liveness(child, spec.liveness))

    async def _probe_until_started(self, child: Child, probe: ProbeSpec) -> bool:
        verdict, problem = await self._probe_until(probe, Verdict.PASSING, Verdict.FAILING)
        if verdict is Verdict.FAILING:
            await self._end_unhealthy(child, probe, f"startup probe failed: {problem}")
        return verdict is Verdict.PASSING

    async def _watch_liveness(self, child: Child, probe: ProbeSpec) -> None:
        _, problem = await self._probe_until(probe, Verdict.FAILING)
        await self._end_unhealthy(child, probe, f"liveness probe failed: {problem}")

    async def _probe_until(self, probe: ProbeSpec, *wanted: Verdict) -> tuple[Verdict, str]:
        tracker = ProbeTracker(probe)
        await asyncio.sleep(probe.initial_delay_s)
        while True:
            problem = await self._prober.check(self.spec, probe.action, probe.timeout_s)
            verdict = tracker.observe(problem is None)
            if verdict in wanted:
                return verdict, problem or ""
            await asyncio.sleep(probe.period_s)

    async def _watch_readiness(self, probe: ProbeSpec) -> None:
        tracker = ProbeTracker(probe)
        await asyncio.sleep(probe.initial_delay_s)
        while self._ending is None:
            problem = await self._prober.check(self.spec, probe.action, probe.timeout_s)
            if self._ending is not None:
                return  # It may well answer while it ends, but it is not there for anyone any more.
            ready = tracker.observe(problem is None) is Verdict.PASSING
            if ready != self.status.ready:
                self._event("is ready" if ready else f"is not ready any more: {problem}")
            message = "" if ready else f"not ready: {problem}"
            self._update(ready=ready, message=message)
            await asyncio.sleep(probe.period_s)

    async def _end_unhealthy(self, child: Child, probe: ProbeSpec, reason: str) -> None:
        self._event(reason)
        grace_s = self._grace_s if probe.termination_grace_s is None else probe.termination_grace_s
        await self._end_once(child, grace_s)

    async def _end_once(self, child: Child, grace_s: float) -> None:
        # A failed probe and a stop may both want it; the hook runs once.
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(child, grace_s))
        await asyncio.shield(self._ending)

    async def _end(self, child: Child, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        self._update(ready=False)
        if self.spec.pre_stop is not None:
            hook = asyncio.create_task(self._pre_stop(grace_s))
            ended = asyncio.create_task(child.wait())
            await asyncio.wait({hook, ended}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            hook.cancel()
            await asyncio.gather(hook, return_exceptions=True)
            ended.cancel()
        child.terminate()
        least_s = min(grace_s, _LEAST_GRACE_S)
        if await child.wait(max(deadline - loop.time(), least_s)) is None:
            self._event(f"did not end within {grace_s:g} s and is killed")
            child.kill()
            await child.wait()

    async def _pre_stop(self, timeout_s: float) -> None:
        match self.spec.pre_stop:
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case ExecCommand(argv):
                try:
                    code = await self._machine.run(self.spec, argv, timeout_s)
                except OSError as error:
                    self._event(f"preStop could not be started: {error.strerror}")
                else:
                    if code != 0:
                        self._event(f"preStop ended with {code}")
            case HttpGet() as action:
                if problem := await self._prober.check(self.spec, action, timeout_s):
                    self._event(f"preStop failed: {problem}")

    def _report_fault(self, task: asyncio.Task[None]) -> None:
        # A fault of this program, not of the container: it must be seen, not only at the end.
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._event(f"supervision failed: {fault!r}")
            self._update(phase=Phase.FAILED, ready=False, message=f"supervision failed: {fault!r}")

    def _event(self, line: str) -> None:
        self._on_event(self.spec.pod, self.spec.name, line)

    def _update(
        self,
        *,
        phase: Phase | None = None,
        started: bool | None = None,
        ready: bool | None = None,
        message: str | None = None,
    ) -> None:
        status = self.status
        status.phase = phase or status.phase
        status.started = status.started if started is None else started
        status.ready = status.ready if ready is None else ready
        status.message = status.message if message is None else message
        self._changes.notify()


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
