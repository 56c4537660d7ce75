"""The reconciler: one cluster, its pools, Pods and other objects, brought nearer to what is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from mooncake_core.api import MooncakeCluster
from mooncake_operator.control.asking import Answers, Inquiry
from mooncake_operator.control.carrying_out import Execution
from mooncake_operator.control.causes import Causes, next_look_s
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.credentials import kept_credentials, secret_findings
from mooncake_operator.control.finalizers import freed_because_the_namespace_ends
from mooncake_operator.control.gather import STRANGERS, World, gather
from mooncake_operator.control.inline import with_live_replicas
from mooncake_operator.control.objects import ObjectKeeper
from mooncake_operator.control.picture import Picture, engines_there, picture_of, pod_with_cause
from mooncake_operator.control.problems import NamespaceEndsError
from mooncake_operator.control.reading import read_cluster
from mooncake_operator.control.recent import Recent
from mooncake_operator.control.reports import Context, cluster_report, kept_status, pool_report
from mooncake_operator.control.schedulers import Schedulers, View
from mooncake_operator.control.spec_history import keep_history
from mooncake_operator.control.standalone import StandalonePools, is_own
from mooncake_operator.control.status import StatusWriter, condition, condition_reasons
from mooncake_operator.control.stores import Stores
from mooncake_operator.control.together import together
from mooncake_operator.kube.applier import Applier
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import ForbiddenError
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import (
    POOLS,
    Object,
    Resource,
    is_terminating,
    name_of,
    uid_of,
)
from mooncake_operator.metrics import Metrics
from mooncake_operator.planning import ClusterNames, Credentials, DesiredWorld, reasons, render_plan
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.instances import Phase
from mooncake_operator.planning.manifests.disruption import with_something_to_protect
from mooncake_operator.planning.manifests.plan import Plan as RenderPlan
from mooncake_operator.planning.manifests.plan import inline_pools, plan_of
from mooncake_operator.planning.manifests.services import still_looked_up
from mooncake_operator.planning.observed import Trouble
from mooncake_operator.planning.plan import Plan, must_be_reported_first, plan
from mooncake_operator.settings import Settings

_log = structlog.get_logger()

_POOL_KINDS = frozenset(pool.kind for pool in POOLS)
_MENDED_S = 30.0
"""How soon to look whether a user has mended what no event announces."""
_SETTLING_S = 1.0
"""How often to ask the schedulers while an instance waits to be used, or to be empty."""
_SETTLED_S = 30.0
"""How often to ask them otherwise: instances also leave, and are drained, without the API server."""
_SOONEST_S = 0.05


@dataclass(slots=True)
class _Memory:
    """What is kept of a cluster between passes; losing it costs a few requests, nothing else."""

    applier: Applier
    inquiry: Inquiry
    causes: Causes
    recent: Recent
    refusals: Mapping[str, Sequence[Finding]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Report:
    """What a pass has to say, refusals apart, which may come later."""

    picture: Picture
    plan: Plan
    answers: Answers
    rendered: RenderPlan | None
    scheduler: Object | None


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
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._schedulers = schedulers or Schedulers()
        self._stores = stores or Stores()
        self._clock = clock
        self._watched = watched
        self._events = EventRecorder(client, instance=settings.own_identity(), observe=metrics.observe_event)
        self._status = StatusWriter(client, self._events)
        self._memories: dict[Key, _Memory] = {}
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

    async def _pass(self, key: Key, memory: _Memory) -> Result:
        try:
            world = await gather(self._client, key, memory.recent)
        except ForbiddenError:
            # Rights that lie in the namespace go with it.
            if await freed_because_the_namespace_ends(self._client, key.namespace):
                return Result()
            raise
        if world.cluster is None:
            self._memories.pop(key, None)
        attempt = _Pass(self, key, world, memory)
        try:
            result = await attempt.run()
        except NamespaceEndsError:
            return Result()
        await self._tell_of_drift()
        return result

    def _new_memory(self, key: Key) -> _Memory:
        return _Memory(
            Applier(self._client, on_drift=self._on_drift),
            Inquiry(self._schedulers, self._stores),
            Causes(self._client, key.namespace),
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
            await self._events.record(live, reasons.DRIFT_CORRECTED, note, kind="Warning")


class _Pass:
    """One pass over a cluster."""

    def __init__(self, shared: ClusterReconciler, key: Key, world: World, memory: _Memory) -> None:
        self._shared = shared
        self._client = shared._client
        self._status = shared._status
        self._key = key
        self._world = world
        self._memory = memory
        self._findings: list[Finding] = []
        self._standalone = StandalonePools(self._status, world.pools, world.cluster)
        self._pools = self._standalone.live
        self._now_s = shared._clock()
        self._token = ""
        self._answers: Answers | None = None
        self._causes: Mapping[str, Trouble] = {}
        self._written: dict[str, Object] = {}
        """By uid: objects whose statuses this pass has written."""

    async def run(self) -> Result:
        cluster = self._world.cluster
        if cluster is None or is_terminating(cluster) or self._world.namespace_terminating:
            # Owner references take its objects along: to make or mend anything now would never end.
            return await self._let_go(cluster)
        read = read_cluster(cluster)
        if isinstance(read, Finding):
            # What runs goes on as it is: half of an unreadable wish is worse than the last readable one.
            self._findings.append(read)
            return await self._plan_pools(None, self._world.find("Deployment", f"{self._key.name}-scheduler"))
        return await self._keep(cluster, read)

    async def _let_go(self, cluster: Object | None) -> Result:
        if cluster is None:
            for pool in self._pools.values():
                if not is_terminating(pool):
                    await self._has_no_cluster(pool)
        return await self._plan_pools(None)

    async def _has_no_cluster(self, pool: Object) -> None:
        where = f"MooncakeCluster {self._key.name} in namespace {self._key.namespace}"
        missing = condition("Available", False, reasons.CLUSTER_MISSING, f"there is no {where}; make it")
        await self._status.write(pool, kept_status(pool), [missing])

    async def _keep(self, cluster: Object, read: MooncakeCluster) -> Result:
        keeper = ObjectKeeper(
            self._client, self._memory.applier, cluster, self._world, wrote=self._memory.recent.changed
        )
        inline = [pool.manifest() for pool in inline_pools(read)]
        credentials = kept_credentials(self._world, read)
        self._token = credentials.admin_token
        # Side by side, here and below: what does not rest on each other need not wait for each other.
        await together([self._check_secrets(read), keeper.keep_pools(inline), self._inquire()])
        self._pools |= {
            name: pool for (kind, name), pool in keeper.outcome.live.items() if kind in _POOL_KINDS
        }
        rendered, desired = await self._rendering(read, credentials)
        if desired is not None and rendered is not None:
            history: list[Finding] = []
            await together(
                [
                    _keep_plain(
                        keeper, _plain(desired, self._budgets(desired)), [*inline, *self._looked_up()]
                    ),
                    self._keep_history(rendered, cluster, read, history),
                ]
            )
            self._findings += [*keeper.outcome.findings, *history]
        else:
            self._findings += keeper.outcome.findings
        self._memory.applier.forget_all_but({uid_of(obj) for obj in keeper.outcome.live.values()})
        scheduler = keeper.outcome.live.get(("Deployment", f"{self._key.name}-scheduler"))
        return await self._plan_pools(rendered, scheduler)

    async def _check_secrets(self, read: MooncakeCluster) -> None:
        self._findings += await secret_findings(self._client, read)

    async def _keep_history(
        self, rendered: RenderPlan, cluster: Object, read: MooncakeCluster, findings: list[Finding]
    ) -> None:
        findings += await keep_history(self._client, self._world, rendered, cluster, read, self._pools)

    def _budgets(self, desired: DesiredWorld) -> list[Object]:
        there = {name for kind, name in self._world.owned or {} if kind == "PodDisruptionBudget"}
        return with_something_to_protect(desired.disruption_budgets, self._cluster_pods(), there)

    def _looked_up(self) -> list[Object]:
        there = [obj for (kind, _), obj in (self._world.owned or {}).items() if kind == "Service"]
        return still_looked_up(there, self._cluster_pods())

    async def _inquire(self) -> None:
        self._answers = await self._memory.inquiry.ask(
            self._cluster_pods(), self._token, self._now_s, told=self._told()
        )

    async def _rendering(
        self, read: MooncakeCluster, credentials: Credentials
    ) -> tuple[RenderPlan, DesiredWorld] | tuple[None, None]:
        own = {name: pool for name, pool in self._pools.items() if is_own(pool, self._world.cluster)}
        effective = with_live_replicas(read, own)
        standalone = await self._standalone.usable(effective)
        self._findings += self._standalone.findings
        images = self._shared._settings.images
        try:
            made = plan_of(
                effective,
                ClusterNames(),
                standalone,
                images=images,
                credentials=credentials,
                present=engines_there(self._world.pods, self._pools.values()),
            )
            desired = render_plan(made, with_pods=False)
        except ValueError as error:
            self._findings.append(Finding(reasons.INVALID_SPEC, str(error)))
            return None, None
        return made, desired

    async def _plan_pools(self, rendered: RenderPlan | None, scheduler: Object | None = None) -> Result:
        if self._answers is None:
            await self._inquire()
        answers = self._answers or Answers(View())
        self._causes = await self._memory.causes.of(self._cluster_pods(), self._now_s)
        picture = picture_of(
            self._world, rendered, self._pools, answers.view.registry, self._now_s, self._causes
        )
        made = plan(picture.desired, picture.observed)
        refused = self._memory.refusals
        report = _Report(picture, made, answers, rendered, scheduler)
        first = must_be_reported_first(made, picture.observed)
        if first:
            await self._report(report, refused)
        execution = self._execution(picture, rendered)
        await together(
            [execution.carry_out(made.actions), *([] if first else [self._report(report, refused)])]
        )
        if execution.refusals != refused:
            self._memory.refusals = execution.refusals
            # Whoever has the name that was wanted has come since others' Pods were last read.
            self._memory.recent.changed(STRANGERS)
            await self._report(report, execution.refusals)
        return self._result(made)

    def _execution(self, picture: Picture, rendered: RenderPlan | None) -> Execution:
        owned = self._world.owned or {}
        return Execution(
            self._client,
            self._shared._schedulers,
            self._shared._events,
            namespace=self._key.namespace,
            plan=rendered,
            pools={pool.name: pool for pool in picture.desired.pools},
            owners=self._as_written(picture.owners),
            revisions=[obj for (kind, _), obj in owned.items() if kind == "ControllerRevision"],
            scheduler_pods=self._cluster_pods(),
            token=self._token,
        )

    async def _report(self, report: _Report, refusals: Mapping[str, Sequence[Finding]]) -> None:
        """Write all statuses."""
        picture = report.picture
        context = Context(
            picture, report.plan, refusals, report.answers, self._shared._settings.measure_seconds
        )
        statuses = [
            (owner, *pool_report(context, owner))
            for name, owner in self._as_written(picture.owners).items()
            if owner["kind"] in _POOL_KINDS and name == name_of(owner)
        ]
        cluster = self._world.cluster
        if cluster is not None and not is_terminating(cluster):
            status, conditions = cluster_report(
                context,
                cluster,
                report.rendered.cluster.spec if report.rendered is not None else None,
                findings=self._findings,
                scheduler=report.scheduler,
                scheduler_pods=[pod_with_cause(pod, self._causes) for pod in self._scheduler_pods()],
            )
            statuses.append((cluster, status, conditions))
        for live in await together(self._status.write(*each) for each in statuses):
            self._written[uid_of(live)] = live
        if cluster is not None:
            self._world = replace(self._world, cluster=self._written.get(uid_of(cluster), cluster))

    def _as_written(self, owners: Mapping[str, Object]) -> dict[str, Object]:
        """Objects as this pass has left them."""
        return {name: self._written.get(uid_of(owner), owner) for name, owner in owners.items()}

    def _result(self, made: Plan) -> Result:
        now_s = self._now_s
        times = [_MENDED_S] if self._findings or self._memory.refusals else []
        if made.look_again_s is not None:
            times.append(made.look_again_s - now_s)
        if (look_s := next_look_s(self._cluster_pods(), now_s)) is not None:
            times.append(look_s - now_s)
        gated = [o for o in made.outcomes.values() if o.pool.gated]
        if gated:
            settling = any(
                i.phase in (Phase.READY, Phase.DRAINING) for outcome in gated for i in outcome.instances
            )
            times.append(_SETTLING_S if settling else _SETTLED_S)
        return Result(max(_SOONEST_S, min(times)) if times else None)

    def _cluster_pods(self) -> list[Object]:
        name = self._key.name
        return [
            pod
            for pod in self._world.pods
            if (pod["metadata"].get("labels") or {}).get("mooncake.io/cluster") == name
        ]

    def _scheduler_pods(self) -> list[Object]:
        return [
            pod
            for pod in self._cluster_pods()
            if pod["metadata"]["labels"].get("mooncake.io/role") == "scheduler" and not is_terminating(pod)
        ]

    def _told(self) -> set[str]:
        return set() if self._world.cluster is None else condition_reasons(self._world.cluster)


async def _keep_plain(keeper: ObjectKeeper, plain: Sequence[Object], others: Sequence[Object]) -> None:
    await keeper.keep(plain)
    await keeper.prune([*plain, *others])


def _plain(desired: DesiredWorld, budgets: Sequence[Object]) -> list[Object]:
    """All but Pods and pools, those first that others refer to."""
    return [
        *desired.secrets,
        *desired.config_maps,
        *desired.services,
        *desired.network_policies,
        *budgets,
        *desired.deployments,
    ]
