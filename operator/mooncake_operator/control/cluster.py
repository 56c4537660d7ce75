"""The reconciler: one cluster, its pools, Pods and other objects, brought nearer to what is wanted."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mooncake_core.api import MooncakeCluster, Pool
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.credentials import kept_credentials, missing_secrets
from mooncake_operator.control.gather import World, gather
from mooncake_operator.control.inline import with_live_replicas
from mooncake_operator.control.objects import ObjectKeeper
from mooncake_operator.control.problems import NamespaceEndsError
from mooncake_operator.control.reading import read_cluster, read_pool
from mooncake_operator.control.status import StatusWriter, condition
from mooncake_operator.kube.applier import Applier
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import Object, controller_uid, is_terminating, name_of, uid_of
from mooncake_operator.metrics import Metrics
from mooncake_operator.planning import ClusterNames, DesiredWorld, reasons, render
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.manifests.plan import inline_pools
from mooncake_operator.settings import Settings

_log = structlog.get_logger()

CLUSTER_MISSING = "ClusterMissing"
READY = "Ready"
LOOK_AGAIN_S = 30.0
"""How soon to look whether a user has mended what no event announces."""


class ClusterReconciler:
    """Reconciles clusters; see `contract.Reconciler`."""

    def __init__(self, client: Client, settings: Settings, metrics: Metrics) -> None:
        """Take the client and the process's settings."""
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._events = EventRecorder(client, instance=settings.own_identity())
        self._status = StatusWriter(client, self._events)
        self._appliers: dict[Key, Applier] = {}
        self._drifted: list[Object] = []

    async def reconcile(self, key: Key) -> Result:
        """One pass."""
        world = await gather(self._client, key)
        if world.cluster is None:
            self._appliers.pop(key, None)
            return await self._without_cluster(key, world)
        if is_terminating(world.cluster) or world.namespace_terminating:
            # Owner references take its objects along. To make or mend anything now would never end (#6, #27).
            return Result()
        applier = self._appliers.setdefault(key, Applier(self._client, on_drift=self._on_drift))
        attempt = _Pass(self._client, self._settings, self._status, applier, world, world.cluster)
        try:
            result = await attempt.run()
        except NamespaceEndsError:
            return Result()
        await self._tell_of_drift()
        return result

    def _on_drift(self, live: Object) -> None:
        _log.info("drift corrected", kind=live["kind"], name=name_of(live))
        self._metrics.drift_corrected.labels(live["kind"]).inc()
        self._drifted.append(live)

    async def _tell_of_drift(self) -> None:
        drifted, self._drifted = self._drifted, []
        for live in drifted:
            note = "fields that the cluster decides on had been changed; change the MooncakeCluster instead"
            await self._events.record(live, "DriftCorrected", note, kind="Warning")

    async def _without_cluster(self, key: Key, world: World) -> Result:
        for pool in world.pools:
            if not is_terminating(pool):
                message = f"there is no MooncakeCluster {key.name} in namespace {key.namespace}; make it"
                missing = condition("Available", False, CLUSTER_MISSING, message)
                await self._status.write(pool, _without_conditions(pool), [missing])
        return Result()


@dataclass(slots=True)
class _Pass:
    """One pass over a cluster that is there to stay."""

    client: Client
    settings: Settings
    status: StatusWriter
    applier: Applier
    world: World
    cluster: Object

    async def run(self) -> Result:
        read = read_cluster(self.cluster)
        if isinstance(read, Finding):
            # What runs goes on as it is: half of an unreadable wish is worse than the last readable one.
            await self._report([read], None)
            return Result()
        findings = await missing_secrets(self.client, read)
        keeper = ObjectKeeper(self.client, self.applier, self.cluster, self.world)
        desired = self._desired(read, findings)
        if desired is not None:
            inline = [pool.manifest() for pool in inline_pools(read)]
            await keeper.keep_pools(inline)
            plain = [*desired.secrets, *desired.config_maps, *desired.services, *desired.deployments]
            await keeper.keep(plain)
            await keeper.prune([*plain, *inline])
            findings += keeper.outcome.findings
        self.applier.forget_all_but(self._uids(keeper))
        await self._report(
            findings, keeper.outcome.live.get(("Deployment", f"{read.metadata.name}-scheduler"))
        )
        return Result(requeue_after_s=LOOK_AGAIN_S if findings else None)

    def _desired(self, cluster: MooncakeCluster, findings: list[Finding]) -> DesiredWorld | None:
        live = {name_of(pool): pool for pool in self.world.pools if self._is_own(pool)}
        standalone = []
        for pool in self.world.pools:
            if self._is_own(pool) or is_terminating(pool):
                continue
            read = read_pool(pool)
            if isinstance(read, Finding):
                findings.append(Finding(read.reason, f"{pool['kind']} {name_of(pool)}: {read.message}"))
            else:
                standalone.append(read)
        try:
            return self._render(with_live_replicas(cluster, live), standalone)
        except ValueError as error:
            findings.append(Finding(reasons.INVALID_SPEC, str(error)))
            return None

    def _render(self, cluster: MooncakeCluster, standalone: list[Pool]) -> DesiredWorld:
        credentials = kept_credentials(self.world, cluster)
        return render(
            cluster, ClusterNames(), standalone, images=self.settings.images, credentials=credentials
        )

    def _is_own(self, pool: Object) -> bool:
        return controller_uid(pool) == uid_of(self.cluster)

    def _uids(self, keeper: ObjectKeeper) -> set[str]:
        return {uid_of(obj) for obj in keeper.outcome.live.values()}

    async def _report(self, findings: list[Finding], scheduler: Object | None) -> None:
        conditions = [_ready(findings, scheduler), _scheduler_ready(scheduler)]
        name, namespace = name_of(self.cluster), self.cluster["metadata"]["namespace"]
        endpoint = f"http://{name}-scheduler.{namespace}.svc" if scheduler is not None else None
        await self.status.write(self.cluster, {"endpoint": endpoint}, conditions)


def _ready(findings: list[Finding], scheduler: Object | None) -> Object:
    if findings:
        return condition("Ready", False, findings[0].reason, "; ".join(f.message for f in findings))
    serving = _scheduler_ready(scheduler)
    if serving["status"] != "True":
        return condition("Ready", False, serving["reason"], serving["message"])
    return condition("Ready", True, READY, "")


def _scheduler_ready(scheduler: Object | None) -> Object:
    if scheduler is None:
        return condition("SchedulerReady", False, reasons.SCHEDULER_ABSENT, "there is no scheduler yet")
    status, wanted = scheduler.get("status") or {}, scheduler["spec"].get("replicas", 1)
    available = status.get("availableReplicas", 0)
    behind = status.get("observedGeneration", 0) != scheduler["metadata"].get("generation")
    if available >= 1 and not behind:
        return condition("SchedulerReady", True, reasons.SCHEDULER_AVAILABLE, f"{available} of {wanted}")
    said = next((c["message"] for c in status.get("conditions", ()) if c.get("status") == "False"), "")
    message = f"{available} of {wanted} schedulers are available; {said}".removesuffix("; ")
    return condition("SchedulerReady", False, reasons.SCHEDULER_UNAVAILABLE, message)


def _without_conditions(live: Object) -> Object:
    kept: Object = {
        field: value
        for field, value in (live.get("status") or {}).items()
        if field not in ("conditions", "observedGeneration")
    }
    return kept
