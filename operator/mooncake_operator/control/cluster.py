"""The reconciler: passes over clusters, and what is kept between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from mooncake_operator.control.asking import Inquiry
from mooncake_operator.control.causes import Causes
from mooncake_operator.control.cluster_pass import ClusterPass
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.finalizers import freed_because_the_namespace_ends
from mooncake_operator.control.gather import gather
from mooncake_operator.control.kept import Memory, Tools
from mooncake_operator.control.problems import NamespaceEndsError
from mooncake_operator.control.recent import Recent
from mooncake_operator.control.schedulers import Schedulers
from mooncake_operator.control.status import StatusWriter
from mooncake_operator.control.stores import Stores
from mooncake_operator.kube.applier import Applier
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import ForbiddenError
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import Object, Resource, name_of
from mooncake_operator.metrics import Metrics
from mooncake_operator.planning import reasons
from mooncake_operator.settings import Settings

_log = structlog.get_logger()


class ClusterReconciler:
    """Reconciles clusters; see `contract.Reconciler`."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        metrics: Metrics,
        *,
        schedulers: Schedulers | None = None,
        stores: Stores | None = None,
        clock: Callable[[], float] = time.time,
        watched: bool = False,
    ) -> None:
        """Take the client, the process's settings, and the wall clock.

        `watched`: whether `notice` is called for each event, and `forget` where some may have been missed.
        """
        events = EventRecorder(client, instance=settings.own_identity(), observe=metrics.observe_event)
        self._tools = Tools(
            client,
            schedulers or Schedulers(),
            events,
            StatusWriter(client, events, now=lambda: datetime.fromtimestamp(clock(), UTC)),
            settings.images,
            settings.measure_seconds,
        )
        self._stores = stores or Stores()
        self._metrics = metrics
        self._clock = clock
        self._watched = watched
        self._memories: dict[Key, Memory] = {}
        self._drifted: list[Object] = []

    def notice(self, key: Key, resource: Resource) -> None:
        """Something of this kind has come, gone or changed, that belongs to a cluster."""
        if (memory := self._memories.get(key)) is not None:
            memory.recent.changed(resource)

    def forget(self) -> None:
        """Events may have been missed: let all be read anew."""
        for memory in self._memories.values():
            memory.recent.forget()

    async def reconcile(self, key: Key) -> Result:
        """One pass."""
        # Kept before anything is read: what changes meanwhile must find somebody to tell.
        memory = self._memories.get(key) or self._new_memory(key)
        self._memories[key] = memory
        try:
            return await self._pass(key, memory)
        except BaseException:
            # It may have written what it could not tell of any more.
            memory.recent.forget()
            raise

    async def _pass(self, key: Key, memory: Memory) -> Result:
        client = self._tools.client
        try:
            world = await gather(client, key, memory.recent)
        except ForbiddenError:
            # Rights that lie in the namespace go with it.
            if await freed_because_the_namespace_ends(client, key.namespace):
                return Result()
            raise
        try:
            result = await ClusterPass(self._tools, key, world, memory, self._clock()).run()
        except NamespaceEndsError:
            if world.cluster is None:
                self._memories.pop(key, None)
            return Result()
        if world.cluster is None and not memory.refusals:
            # With refusals forgotten, the next pass would tell of them as of news, and so wake itself.
            self._memories.pop(key, None)
        await self._tell_of_drift()
        return result

    def _new_memory(self, key: Key) -> Memory:
        client = self._tools.client
        return Memory(
            Applier(client, on_drift=self._on_drift),
            Inquiry(self._tools.schedulers, self._stores),
            Causes(client, key.namespace),
            Recent(trusted=self._watched),
        )

    def _on_drift(self, live: Object) -> None:
        _log.info("drift corrected", kind=live["kind"], name=name_of(live))
        self._metrics.drift_corrected.labels(live["kind"]).inc()
        self._drifted.append(live)

    async def _tell_of_drift(self) -> None:
        drifted, self._drifted = self._drifted, []
        for live in drifted:
            note = "fields that the cluster decides on had been changed; change the MooncakeCluster instead"
            await self._tools.events.record(live, reasons.DRIFT_CORRECTED, note, kind="Warning")
