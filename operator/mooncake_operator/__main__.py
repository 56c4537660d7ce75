"""The operator: `python -m mooncake_operator`, set up by environment variables (see `settings`)."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import structlog
import uvloop

from mooncake_core.collector import freeze_what_lives
from mooncake_core.standard_streams import lose_what_cannot_be_written
from mooncake_operator.control.backoff import Backoff
from mooncake_operator.control.cluster import ClusterReconciler
from mooncake_operator.control.contract import Key
from mooncake_operator.control.definitions import OldDefinitionsError, require_current_definitions
from mooncake_operator.control.gather import list_known
from mooncake_operator.control.leadership import Leadership, LeadershipLostError, LeaseTerms
from mooncake_operator.control.leadership_thread import LeadershipThread
from mooncake_operator.control.lifecycle import Lifecycle, WatchingFailedError
from mooncake_operator.control.resync import Resync
from mooncake_operator.control.workers import Workers
from mooncake_operator.control.workqueue import WorkQueue
from mooncake_operator.handlers import cluster_of, kopf_settings, make_registry
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.configuration import NoClusterError, find_configuration
from mooncake_operator.kube.resources import CLUSTER, POOLS, Resource
from mooncake_operator.logs import set_up_logging
from mooncake_operator.metrics import Metrics
from mooncake_operator.settings import Settings, SettingsError

_log = structlog.get_logger()


class Process:
    """The parts of one operator process, put together."""

    def __init__(self, settings: Settings, metrics: Metrics, client: Client) -> None:
        """Make them; nothing runs yet."""
        self._settings = settings
        self._metrics = metrics
        self._client = client
        self._queue: WorkQueue[Key] = WorkQueue(
            rest_s=settings.rest_seconds,
            on_added=metrics.queue_adds.inc,
            on_taken=metrics.queue_latency_s.observe,
        )
        backoff: Backoff[Key] = Backoff(
            first_s=settings.backoff_seconds, longest_s=settings.backoff_max_seconds, chance=random.random
        )
        self._resync = Resync(
            self._keys, self._queue, backoff, period_s=settings.resync_seconds, chance=random.random
        )
        self._reconciler = ClusterReconciler(client, settings, metrics, watched=True)
        workers = Workers(
            self._queue,
            self._reconciler,
            backoff,
            count=settings.workers,
            observe=metrics.observe_pass,
            on_retry=metrics.queue_retries.inc,
        )
        self.lifecycle = Lifecycle(
            queue=self._queue,
            workers=workers,
            resync=self._resync,
            watch=self._watch,
            leadership=self._leadership() if settings.lease else None,
            stop_s=settings.stop_seconds,
            on_watch_failed=metrics.watch_restarts.inc,
            observe=self._observe,
        )

    def _leadership(self) -> LeadershipThread:
        terms = self._terms()

        @asynccontextmanager
        async def candidate() -> AsyncIterator[Leadership]:
            # Connections belong to the loop that they were opened in.
            async with Client(await find_configuration(), observer=self._metrics.observe_request) as client:
                yield Leadership(client, terms)

        return LeadershipThread(candidate, end_within_s=terms.duration_s - terms.renew_deadline_s)

    def _terms(self) -> LeaseTerms:
        duration_s = self._settings.lease_duration_seconds
        return LeaseTerms(
            self._settings.own_namespace(),
            self._settings.lease_name,
            self._settings.own_identity(),
            duration_s=duration_s,
            renew_deadline_s=duration_s * 2 / 3,
            retry_s=duration_s * 2 / 15,
        )

    async def _keys(self) -> Iterable[Key]:
        # Now and then, and after each gap of a watch: events may have been missed.
        self._reconciler.forget()
        keys: set[Key] = set()
        for namespace in self._settings.namespaces or (None,):
            for resource in (CLUSTER, *POOLS):
                found = await list_known(self._client, resource, namespace)
                keys |= {key for obj in found if (key := cluster_of(resource, obj))}
        return keys

    async def _watch(self, stop: asyncio.Event) -> None:
        settings = self._settings
        registry = make_registry(
            self._metrics,
            seen=self._seen,
            unhealthy=self.lifecycle.unhealthy,
            on_listed=self._resync.request,
            on_started=self.take_signals,
        )
        # Otherwise kopf asks for the user's name, and the uid of a Pod has none. Unused: there are no peers.
        identity: Any = settings.own_identity()
        await kopf.operator(
            identity=identity,
            registry=registry,
            settings=kopf_settings(settings),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=f"http://{settings.listen}:{settings.health_port}/healthz",
            stop_flag=stop,
        )

    def _seen(self, key: Key, resource: Resource) -> None:
        self._reconciler.notice(key, resource)
        self._queue.add(key)

    def take_signals(self) -> None:
        """Stop in order on SIGTERM and SIGINT; kopf, when it starts, puts its own handlers there."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.lifecycle.stop)

    def _observe(self) -> None:
        metrics = self._metrics
        metrics.queue_depth.set(self._queue.depth)
        metrics.queue_active.set(self._queue.active)
        metrics.queue_oldest_s.set(self._queue.oldest_age_s())
        metrics.resync_failures.set(self._resync.failures)
        metrics.leader.set(self.lifecycle.leading)


async def run(settings: Settings) -> None:
    """Run one operator until a signal.

    Raises:
        NoClusterError: no credentials were found.
        OldDefinitionsError: the definitions of its kinds are older than this operator.
        LeadershipLostError: another operator has the Lease.
        WatchingFailedError: watching does not stay up.
        OSError: the metrics' port is taken.
    """
    metrics = Metrics()
    server, thread = metrics.serve(settings.listen, settings.metrics_port)
    try:
        configuration = await find_configuration()
        async with Client(configuration, observer=metrics.observe_request) as client:
            process = Process(settings, metrics, client)
            process.take_signals()
            await require_current_definitions(client, namespace=(*settings.namespaces, "default")[0])
            freeze_what_lives()
            await process.lifecycle.run()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> int:
    """Run the operator; returns the exit code."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        print(f"mooncake-operator: {error}", file=sys.stderr)
        return 2
    set_up_logging(settings.log_level)
    try:
        uvloop.run(run(settings))
    except (NoClusterError, OldDefinitionsError, LeadershipLostError, WatchingFailedError, OSError) as error:
        _log.error("the operator ends", why=str(error), error=type(error).__name__)
        return 1
    _log.info("the operator ends", why="asked to")
    return 0


if __name__ == "__main__":
    lose_what_cannot_be_written()
    sys.exit(main())
