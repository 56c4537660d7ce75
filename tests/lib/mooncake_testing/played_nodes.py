"""What nodes and schedulers would do, played: Pods get addresses and become ready, instances register."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import POD, Object, is_terminating, name_of, uid_of
from mooncake_scheduler.recent import WINDOWS_S, Recent

TOKEN_HEADER = "Authorization"


@dataclass
class PlayedScheduler:
    """The admin port of a scheduler: an honest registry, without engines."""

    port: int = 0
    away: bool = False
    degraded: bool = False
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    lately: dict[str, Recent] = field(default_factory=lambda: {"ttft": Recent(), "tbt": Recent()})
    """What it has measured, at times of `now_s`."""
    now_s: float = 1_000_000.0
    """Its clock."""

    @contextlib.asynccontextmanager
    async def serve(self, address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[PlayedScheduler]:
        app = web.Application()
        app.router.add_get("/instances", self._list)
        app.router.add_get("/stats", self._stats)
        app.router.add_post("/instances/{id}/drain", self._drain)
        app.router.add_delete("/instances/{id}/drain", self._undrain)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, address, port)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    def register(self, name: str, in_flight: int = 0) -> None:
        self.instances.setdefault(name, {"state": "ready", "in_flight": in_flight})

    async def _list(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get(TOKEN_HEADER, ""))
        if self.away:
            raise web.HTTPServiceUnavailable
        views = [
            {
                "id": name,
                "role": "prefill",
                "state": known["state"],
                "load": {"queued": 0, "batch": known["in_flight"], "arriving": 0},
            }
            for name, known in self.instances.items()
        ]
        degraded = ["the registry is away"] if self.degraded else []
        return web.json_response({"instances": views, "degraded": degraded})

    def serves(self, requests: int, *, ttft_s: float, tbt_s: float) -> None:
        """Measure requests against targets of 30 s and 100 ms."""
        for _ in range(requests):
            self.lately["ttft"].observe(self.now_s, ttft_s, 30.0)
            self.lately["tbt"].observe(self.now_s, tbt_s, 0.1)

    async def _stats(self, request: web.Request) -> web.Response:
        if self.away:
            raise web.HTTPServiceUnavailable
        recent = {
            str(seconds): {name: each.window(self.now_s, seconds) for name, each in self.lately.items()}
            for seconds in WINDOWS_S
        }
        return web.json_response({"recent": recent})

    async def _drain(self, request: web.Request) -> web.Response:
        return self._mark(request, "draining")

    async def _undrain(self, request: web.Request) -> web.Response:
        return self._mark(request, "ready")

    def _mark(self, request: web.Request, state: str) -> web.Response:
        name = request.match_info["id"]
        self.calls.append(f"{state} {name}")
        if self.away:
            raise web.HTTPServiceUnavailable
        if name not in self.instances:
            raise web.HTTPNotFound
        self.instances[name]["state"] = state
        return web.json_response({"id": name, "state": state})


class PlayedNodes:
    """Every kubelet at once: what is created runs, what is deleted ends, on the test's word."""

    def __init__(
        self, client: Client, namespace: str, scheduler: PlayedScheduler, address: str = "127.0.0.1"
    ) -> None:
        self._address = address
        self._client = client
        self._namespace = namespace
        self._scheduler = scheduler
        self.broken: set[str] = set()
        """Names of Pods that shall not become ready."""
        self.stuck: set[str] = set()
        """Names of Pods that shall not end."""
        self.trouble: Callable[[Object], Object | None] = lambda pod: None
        """Status of a new Pod that shall not run; None = it runs."""
        self.registers: Callable[[Object], bool] = lambda pod: True
        """Whether an instance that is ready makes itself known to the schedulers."""

    async def add_scheduler(self, cluster: str) -> None:
        """A scheduler's Pod, which no controller makes here."""
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{cluster}-scheduler-0",
                "namespace": self._namespace,
                "labels": {"mooncake.io/cluster": cluster, "mooncake.io/role": "scheduler"},
            },
            "spec": {"containers": [{"name": "scheduler", "image": "none"}], "nodeName": "node-0"},
        }
        await self._client.create(pod, manager="test")

    async def pods(self, role: str | None = None) -> dict[str, Object]:
        found = await self._client.list_all(POD, self._namespace)
        return {
            name_of(pod): pod
            for pod in found
            if role is None or pod["metadata"].get("labels", {}).get("mooncake.io/role") == role
        }

    async def play(self) -> None:
        """One step of all nodes."""
        pods = await self.pods()
        for name, pod in pods.items():
            if is_terminating(pod):
                if name not in self.stuck:
                    await self._end(name, pod)
            elif (
                name not in self.broken
                and pod.get("status", {}).get("phase") == "Pending"
                and not _waits_for_workers(pod, pods.values())
            ):
                await self._start(name, pod)
            labels = pod["metadata"].get("labels", {})
            ready = any(
                c["type"] == "ContainersReady" and c["status"] == "True"
                for c in pod.get("status", {}).get("conditions", ())
            )
            engine = labels.get("mooncake.io/role") in ("prefill", "decode")
            engine = engine and labels.get("mooncake.io/rank", "0") == "0"
            if ready and engine and not is_terminating(pod) and self.registers(pod):
                self._scheduler.register(name)
        gone = self._scheduler.instances.keys() - (await self.pods()).keys()
        for name in gone:
            del self._scheduler.instances[name]

    async def set_status(self, name: str, status: Object) -> None:
        with contextlib.suppress(NotFoundError):
            await self._client.patch(
                POD,
                self._namespace,
                name,
                {"status": status},
                how="strategic",
                manager="kubelet",
                subresource="status",
            )

    async def _start(self, name: str, pod: Object) -> None:
        trouble = self.trouble(pod)
        if trouble is None:
            await self._run(name, pod)
        else:
            await self.set_status(name, trouble)

    async def bind(self, name: str) -> None:
        """Give a Pod its node, and no more."""
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "node-0"},
        }
        await self._client._call("POST", POD, POD.path(self._namespace, name, "binding"), body=binding)

    async def _run(self, name: str, pod: Object) -> None:
        if not pod["spec"].get("nodeName"):
            await self.bind(name)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": stamp}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        running = {
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": stamp}},
        }
        await self.set_status(
            name,
            {
                "phase": "Running",
                "containerStatuses": [
                    {"name": container["name"], "image": container["image"], **running}
                    for container in pod["spec"]["containers"]
                ],
                "podIP": self._address,
                "podIPs": [{"ip": self._address}],
                "conditions": conditions,
            },
        )

    async def _end(self, name: str, pod: Object) -> None:
        with contextlib.suppress(NotFoundError):
            await self._client.delete(POD, self._namespace, name, uid=uid_of(pod), grace_s=0)


def _waits_for_workers(pod: Object, pods: Iterable[Object]) -> bool:
    """Whether a Pod leads an instance whose workers do not run yet: till then its engine is not healthy."""
    labels, annotations = pod["metadata"].get("labels", {}), pod["metadata"].get("annotations", {})
    workers = int(annotations.get("mooncake.io/instance-size", "1")) - 1
    if labels.get("mooncake.io/rank") != "0" or not workers:
        return False
    running = [
        other
        for other in pods
        if other["metadata"].get("annotations", {}).get("mooncake.io/leader-uid") == uid_of(pod)
        and other.get("status", {}).get("phase") == "Running"
    ]
    return len(running) < workers
