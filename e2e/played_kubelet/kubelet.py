"""The loop that plays kubelets: follows the Pods bound to its nodes and writes what became of them."""

import asyncio
import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

import aiohttp

from e2e.kube import Kube, KubeError
from e2e.played_kubelet import nodes
from e2e.played_kubelet.behaviour import (
    Behaviour,
    Exits,
    ImageMissing,
    NeverReady,
    NodePressure,
    Script,
    obedient,
)
from e2e.played_kubelet.nodes import NodeShape, stamp
from e2e.played_kubelet.status import Life, status_of

Pod = dict[str, Any]

_CONCURRENT_STARTS = 32


class PlayedNodes:
    """Nodes with played kubelets, as an async context manager.

    ``async with PlayedNodes(kube, 50) as played:`` registers the nodes, plays them, removes them at the end.
    """

    def __init__(
        self,
        kube: Kube,
        count: int,
        *,
        script: Script = obedient,
        shape: NodeShape | None = None,
        prefix: str = "played",
        heartbeat_s: float = 5.0,
    ) -> None:
        """Say what to play.

        Args:
            kube: where.
            count: of nodes; they are called ``<prefix>-0`` and so on.
            script: decides how each Pod behaves; may be replaced any time (attribute ``script``).
            shape: what each node offers.
            prefix: of the nodes' names.
            heartbeat_s: seconds between heartbeats of one node.
        """
        self.names = [f"{prefix}-{number}" for number in range(count)]
        self.script = script
        self._kube = kube
        self._shape = shape or NodeShape()
        self._heartbeat_s = heartbeat_s
        self._silent: set[str] = set()
        self._played: dict[str, _Played] = {}
        self._addresses = ipaddress.IPv4Network("10.128.0.0/12").hosts()

    async def __aenter__(self) -> Self:
        starts = asyncio.Semaphore(_CONCURRENT_STARTS)

        async def register(name: str) -> None:
            async with starts:
                await nodes.register(self._kube, name, self._shape)

        await asyncio.gather(*map(register, self.names))
        await nodes.wait_until_usable(self._kube, self.names)
        beating = nodes.keep_beating(self._kube, self.names, self._heartbeat_s, self._silent)
        self._tasks = [asyncio.create_task(beating), asyncio.create_task(self._follow())]
        return self

    async def __aexit__(self, *_: object) -> None:
        played = [played.task for played in self._played.values()]
        for task in [*self._tasks, *played]:
            task.cancel()
        await asyncio.gather(*self._tasks, *played, return_exceptions=True)
        await nodes.remove(self._kube, self.names)

    def pods(self) -> Iterator[tuple[Pod, bool]]:
        """Pods on these nodes as last seen, each with whether its containers are ready."""
        for played in self._played.values():
            yield played.pod, played.ready

    def vanish(self, name: str) -> None:
        """The node stops to answer: no heartbeats, and nothing happens to its Pods any more."""
        self._silent.add(name)

    async def come_back(self, name: str) -> None:
        """The node answers again, and sees what was decided meanwhile."""
        self._silent.discard(name)
        await nodes.beat(self._kube, name)
        await nodes.report_ready(self._kube, name, self._shape)
        for played in self._played.values():
            played.changed.set()

    async def _follow(self) -> None:
        """Follow all Pods; whatever ends the stream, begin again from a fresh list."""
        while True:
            with suppress(KubeError, aiohttp.ClientError, TimeoutError):
                pods, version = await self._kube.snapshot("Pod")
                self._take_snapshot(pods)
                async for change, pod in self._kube.watch("Pod", version):
                    self._take(change, pod)
            await asyncio.sleep(0.2)

    def _take_snapshot(self, pods: list[Pod]) -> None:
        there = {pod["metadata"]["uid"] for pod in pods}
        for uid in self._played.keys() - there:
            self._forget(uid)
        for pod in pods:
            self._take("ADDED", pod)

    def _take(self, change: str, pod: Pod) -> None:
        uid = pod["metadata"]["uid"]
        if change == "DELETED":
            self._forget(uid)
        elif uid in self._played:
            self._played[uid].see(pod)
        elif pod["spec"].get("nodeName") in self.names and not _has_ended(pod):
            address = pod.get("status", {}).get("podIP") or str(next(self._addresses))
            self._played[uid] = _Played(self._kube, pod, self.script(pod), address, self._silent)

    def _forget(self, uid: str) -> None:
        if played := self._played.pop(uid, None):
            played.task.cancel()


class _Played:
    """One Pod's containers, as far as anybody can see."""

    def __init__(self, kube: Kube, pod: Pod, behaviour: Behaviour, address: str, silent: set[str]) -> None:
        self._kube = kube
        self._pod = pod
        self._behaviour = behaviour
        self._silent = silent
        self._life = Life(pod_ip=address, started_at=pod.get("status", {}).get("startTime") or stamp())
        self._written: Mapping[str, Any] = {}
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._play())

    @property
    def pod(self) -> Pod:
        """The Pod as last seen."""
        return self._pod

    @property
    def ready(self) -> bool:
        """Whether its containers are."""
        return self._life.stage == "Ready"

    def see(self, pod: Pod) -> None:
        """Take the Pod as it is now."""
        self._pod = pod
        self.changed.set()

    async def _play(self) -> None:
        if not await self._runs_for(self._behaviour.start_s) or not await self._start():
            await self._stop()
            return
        while await self._runs_for(None):  # readiness gates open and close
            await self._write()
        await self._stop()

    async def _start(self) -> bool:
        """Bring the containers to where the behaviour lets them go; False when the Pod is to stop."""
        fault = self._behaviour.fault
        if isinstance(fault, ImageMissing):
            self._life.waiting, self._life.message = "ErrImagePull", "played: the image cannot be pulled"
            await self._write()
            return True
        self._run()
        if self._behaviour.ready_s > 0 or fault is not None:
            await self._write()
            if not await self._runs_for(self._behaviour.ready_s):
                return False
        if isinstance(fault, NodePressure):
            if not await self._runs_for(fault.after_s):
                return False
            self._fail("Evicted", "The node was low on resource: memory.")
        elif isinstance(fault, Exits):
            return await self._crash(fault)
        elif not isinstance(fault, NeverReady):
            self._life.stage = "Ready"
        await self._write()
        return True

    async def _crash(self, fault: Exits) -> bool:
        count = 0
        while fault.times == 0 or count < fault.times:
            if not await self._runs_for(fault.after_s):
                return False
            count += 1
            self._life.last_end = {"exitCode": fault.code, "reason": fault.reason, "finishedAt": stamp()}
            if self._pod["spec"].get("restartPolicy", "Always") == "Never":
                self._fail("Error", f"played: exit code {fault.code}")
                await self._write()
                return True
            self._life.stage, self._life.waiting = "Running", "CrashLoopBackOff"
            await self._write()
            if not await self._runs_for(fault.backoff_s):
                return False
            self._life.restarts += 1
            self._run()
            await self._write()
        self._life.stage = "Ready"
        await self._write()
        return True

    def _run(self) -> None:
        self._life.stage, self._life.waiting, self._life.message = "Running", "", ""
        self._life.running_at = stamp()

    def _fail(self, reason: str, message: str) -> None:
        self._life.stage, self._life.failure, self._life.message = "Failed", reason, message

    async def _stop(self) -> None:
        asked = self._behaviour.stop_s
        if asked is None:
            await asyncio.Event().wait()
        grace = self._pod["metadata"].get("deletionGracePeriodSeconds") or 0
        await asyncio.sleep(min(asked or 0.0, grace))
        await self._while_silent()
        metadata = self._pod["metadata"]
        while True:
            with suppress(aiohttp.ClientError, TimeoutError, KubeError):
                await self._kube.delete(
                    "Pod", metadata["name"], metadata["namespace"], grace_s=0, uid=metadata["uid"]
                )
                return
            await asyncio.sleep(0.5)

    async def _runs_for(self, seconds: float | None) -> bool:
        """Wait so long, or (None) for any change; False as soon as the Pod is being deleted."""
        end = None if seconds is None else asyncio.get_running_loop().time() + seconds
        while "deletionTimestamp" not in self._pod["metadata"]:
            left = None if end is None else end - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
                await self._while_silent()
                return True
            if end is not None:
                self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), left)
                if end is None:
                    # Not before waiting: what changed while the last change was written would be lost.
                    self.changed.clear()
                    if "deletionTimestamp" not in self._pod["metadata"]:
                        return True
        await self._while_silent()
        return False

    async def _while_silent(self) -> None:
        while self._pod["spec"]["nodeName"] in self._silent:
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 1.0)

    async def _write(self) -> None:
        await self._while_silent()
        status = status_of(self._pod, self._life, stamp())
        if status == self._written:
            return
        metadata = self._pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        for _ in range(20):
            try:
                await self._kube.patch(
                    "Pod",
                    metadata["name"],
                    body,
                    metadata["namespace"],
                    how="strategic",
                    subresource="status",
                )
            except KubeError as error:
                if error.status in (404, 409):  # gone, or another Pod of this name
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass
            else:
                self._written = status
                return
            await asyncio.sleep(0.5)


def _has_ended(pod: Pod) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed") and (
        "deletionTimestamp" not in pod["metadata"]
    )
