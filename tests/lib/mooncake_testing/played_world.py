"""A cluster on a real API server with everything that acts on it: reconciler, played nodes and scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from mooncake_operator.control.cluster import ClusterReconciler
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.schedulers import Schedulers
from mooncake_operator.control.stores import Stores
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import BY_KIND, DECODE_POOL, DEPLOYMENT, Object, is_terminating, uid_of
from mooncake_operator.metrics import Metrics
from mooncake_operator.settings import Settings
from mooncake_testing.played_nodes import PlayedNodes, PlayedScheduler

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
GATE = "mooncake.io/routable"


class PlayedWorld:
    """A cluster in a namespace, and everything that acts on it."""

    def __init__(
        self, client: Client, namespace: str, scheduler: PlayedScheduler, cluster: str = "q"
    ) -> None:
        self.client = client
        self.namespace = namespace
        self.scheduler = scheduler
        self.cluster = cluster
        self.passed_s = 0.0
        """How far the operator's clock is ahead: waiting without waiting."""
        self.store_port = 1
        """Where the store's master answers; nobody does unless a test starts one."""
        self.nodes = PlayedNodes(client, namespace, scheduler)
        self.writes: list[tuple[str, str]] = []
        self.forgetful = False
        """Whether the operator is a new one for each pass, as if it had been killed after the last."""
        self.settings = Settings()
        """Of the operator; `restart` makes new ones count."""
        self.watched = False
        """Whether the operator believes that it is told of changes, as its process is; nobody does here."""
        client._observer = self._seen
        self._recording = False
        self.restart()

    def restart(self) -> None:
        schedulers = Schedulers(port=self.scheduler.port)
        self.reconciler = ClusterReconciler(
            self.client,
            self.settings,
            Metrics(),
            schedulers=schedulers,
            stores=Stores(port=self.store_port),
            clock=lambda: time.time() + self.passed_s,
            watched=self.watched,
        )

    def _seen(self, verb: str, plural: str, status: int, seconds: float) -> None:
        if self._recording and verb not in ("get", "list"):
            self.writes.append((verb, plural))

    async def apply(self, change: Callable[[Any], None] = lambda spec: None) -> Object:
        manifest = yaml.safe_load(QUICKSTART.read_text())
        manifest["metadata"] = {"name": self.cluster, "namespace": self.namespace}
        manifest["spec"]["decodePools"][0]["drain"] = {"timeoutSeconds": 30}
        change(manifest["spec"])
        return await self.client.apply(manifest, manager="kubectl", force=True)

    async def step(self) -> Result:
        """Nodes do something, then one pass."""
        await self.nodes.play()
        return await self.reconcile()

    async def reconcile(self) -> Result:
        if self.forgetful:
            self.restart()
        self.writes.clear()
        self._recording = True
        try:
            return await self.reconciler.reconcile(Key(self.namespace, self.cluster))
        finally:
            self._recording = False

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str, steps: int = 60) -> None:
        for _ in range(steps):
            if await holds():
                return
            await self.step()
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within {steps} passes: {what}; {await self.condition('Ready')}")

    async def get(self, kind: str, name: str) -> Object | None:
        try:
            return await self.client.get(BY_KIND[kind], self.namespace, name)
        except NotFoundError:
            return None

    async def condition(self, type_: str, kind: str = "MooncakeCluster", name: str | None = None) -> Object:
        live = await self.get(kind, name or self.cluster)
        assert live is not None
        found: Object = next(
            (c for c in live.get("status", {}).get("conditions", ()) if c["type"] == type_), {}
        )
        return found

    async def is_ready(self) -> bool:
        return (await self.condition("Ready")).get("status") == "True"

    async def bring_up(self, change: Callable[[Any], None] = lambda spec: None) -> None:
        await self.apply(change)
        await self.nodes.add_scheduler(self.cluster)
        await self.reconcile()
        deployment = await self.get("Deployment", f"{self.cluster}-scheduler")
        assert deployment is not None
        counts = {"replicas": 2, "readyReplicas": 2, "availableReplicas": 2, "updatedReplicas": 2}
        status = {"observedGeneration": deployment["metadata"]["generation"], **counts}
        await self.client.patch(
            DEPLOYMENT,
            self.namespace,
            f"{self.cluster}-scheduler",
            {"status": status},
            how="merge",
            manager="test",
            subresource="status",
        )
        await self.until(self.is_ready, "the cluster is Ready")

    async def pods(self, role: str) -> list[str]:
        return sorted(await self.nodes.pods(role))

    async def routable(self, role: str) -> list[str]:
        """Instances that schedulers place work on."""
        return sorted(name for name, pod in (await self.nodes.pods(role)).items() if _is_routable(pod))

    async def uids(self, role: str) -> dict[str, str]:
        return {name: uid_of(pod) for name, pod in (await self.nodes.pods(role)).items()}

    async def gate(self, pod: str) -> Object:
        live = await self.get("Pod", pod)
        assert live is not None
        found: Object = next((c for c in live["status"].get("conditions", ()) if c["type"] == GATE), {})
        return found

    async def scale(self, number: int) -> None:
        body = {"spec": {"replicas": number}}
        await self.client.patch(
            DECODE_POOL,
            self.namespace,
            f"{self.cluster}-decode",
            body,
            how="merge",
            manager="kubectl",
            subresource="scale",
        )


def _is_routable(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return not is_terminating(pod) and any(c["type"] == GATE and c["status"] == "True" for c in conditions)
