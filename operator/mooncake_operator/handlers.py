"""Handlers of kopf: they watch, and put the key of the cluster concerned into the queue; nothing else.

Only `on.event` is used: it writes nothing to the objects, keeps no state and adds no finalizer. A key is
taken from the object itself, so that a handler cannot fail for want of another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from mooncake_operator.control.contract import Key
from mooncake_operator.kube.configuration import in_a_pod
from mooncake_operator.kube.resources import CLUSTER, OWNED, POD, POOLS, Resource
from mooncake_operator.metrics import Metrics
from mooncake_operator.settings import Settings
from mooncake_operator.stateless import NoDiffBase, NoProgress

CLUSTER_LABEL = "mooncake.io/cluster"
_MANAGED = "app.kubernetes.io/managed-by=mooncake-operator"
_TOKEN_LIFE = timedelta(minutes=10)
"""Projected tokens are renewed on disk long before they expire: read them again this often."""

Seen = Callable[[Key, Resource], None]
Unhealthy = Callable[[], str | None]


def cluster_of(resource: Resource, body: Mapping[str, Any]) -> Key | None:
    """The cluster that an object belongs to; None for what belongs to none."""
    metadata = body.get("metadata") or {}
    namespace = metadata.get("namespace")
    if resource == CLUSTER:
        name = metadata.get("name")
    elif resource in POOLS:
        name = ((body.get("spec") or {}).get("clusterRef") or {}).get("name")
    else:
        name = (metadata.get("labels") or {}).get(CLUSTER_LABEL)
    return Key(namespace, name) if isinstance(namespace, str) and isinstance(name, str) else None


def make_registry(
    metrics: Metrics,
    *,
    seen: Seen,
    unhealthy: Unhealthy,
    on_listed: Callable[[], None],
    on_started: Callable[[], None],
) -> kopf.OperatorRegistry:
    """A fresh set of handlers; kopf's global one would keep those of earlier runs.

    Args:
        metrics: gets the times of events.
        seen: told of each event, by the cluster and the kind that it concerns.
        unhealthy: says what is wrong with the process, if anything is.
        on_listed: called for each object of a LIST, with which every watch begins and heals itself.
        on_started: called once kopf has set itself up.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        # kopf takes the signals for itself right after its start-up has begun.
        await asyncio.sleep(0.05)
        on_started()

    @kopf.on.login(registry=registry, retries=3)
    async def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        login = kopf.login_with_service_account if in_a_pod() else kopf.login_with_kubeconfig
        found = login(**kwargs)
        if found is None:
            raise kopf.PermanentError("no Kubernetes cluster; set KUBECONFIG to a kubeconfig")
        return dataclasses.replace(found, expiration=datetime.now(UTC) + _TOKEN_LIFE)

    @kopf.on.probe(registry=registry, id="operator")
    async def probe(**_: Any) -> str:
        # Any other exception would be tried again for a minute, in which the probe times out.
        if wrong := unhealthy():
            raise kopf.PermanentError(wrong)
        return "ok"

    def watch(resource: Resource) -> None:
        @kopf.on.event(
            resource.api_version, resource.plural, registry=registry, id=f"watch-{resource.plural}"
        )
        async def event(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002
            metrics.watch_last_event_s.labels(resource.kind).set(time.time())
            if type is None:
                on_listed()
            if key := cluster_of(resource, body):
                seen(key, resource)

    for resource in (CLUSTER, *POOLS, POD, *OWNED):
        watch(resource)
    return registry


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Settings of the framework; the reasons are in docs/adr/0022."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True
    for resource in (POD, *OWNED):
        chosen.watching.label_selectors[resource.plural] = _MANAGED
    chosen.watching.chunk_size = 500
    chosen.watching.server_timeout = settings.watch_timeout_seconds  # whole seconds, or the server refuses
    chosen.watching.inactivity_timeout = settings.watch_inactivity_seconds
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    chosen.networking.error_backoffs = (1, 2, 3, 5, 8, 13)
    chosen.posting.enabled = False
    chosen.posting.loggers = False
    chosen.scanning.disabled = not settings.scan
    # Unused, for no handler keeps state; but the default would clash with another kopf operator's.
    chosen.persistence.finalizer = "mooncake.io/kopf"
    chosen.persistence.progress_storage = NoProgress()
    chosen.persistence.diffbase_storage = NoDiffBase()
    # The process has its own deadline for stopping, and starts kopf again when its watching fails.
    chosen.process.ultimate_exiting_timeout = None
    return chosen
