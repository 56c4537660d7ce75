"""One pass over a cluster: its pools, Pods and other objects, brought nearer to what is wanted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mooncake_core.api import MooncakeCluster
from mooncake_operator.control.asking import Answers
from mooncake_operator.control.carrying_out import Execution
from mooncake_operator.control.causes import next_look_s
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.credentials import (
    kept_admin_token,
    kept_credentials,
    kept_redis_password,
    secret_findings,
)
from mooncake_operator.control.gather import STRANGERS, World
from mooncake_operator.control.inline import with_live_replicas
from mooncake_operator.control.kept import Memory, Tools
from mooncake_operator.control.objects import ObjectKeeper
from mooncake_operator.control.picture import Picture, engines_there, picture_of, pod_with_cause
from mooncake_operator.control.reading import read_cluster
from mooncake_operator.control.reports import Context, cluster_report, kept_status, pool_report
from mooncake_operator.control.schedulers import View
from mooncake_operator.control.spec_history import keep_history
from mooncake_operator.control.standalone import StandalonePools, is_own
from mooncake_operator.control.status import condition, condition_reasons
from mooncake_operator.control.together import together
from mooncake_operator.kube.resources import POOLS, Object, is_terminating, name_of, uid_of
from mooncake_operator.planning import (
    ClusterNames,
    Credentials,
    DesiredWorld,
    reasons,
    render_plan,
)
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.instances import Phase
from mooncake_operator.planning.manifests.plan import Plan as RenderPlan
from mooncake_operator.planning.manifests.plan import inline_pools, plan_of
from mooncake_operator.planning.observed import Trouble
from mooncake_operator.planning.plan import Plan, must_be_reported_first, plan

_POOL_KINDS = frozenset(pool.kind for pool in POOLS)
_MENDED_S = 30.0
"""How soon to look whether a user has mended what no event announces."""
_SETTLING_S = 1.0
"""How often to ask the schedulers while an instance waits to be used, or to be empty."""
_SETTLED_S = 30.0
"""How often to ask them otherwise: instances also leave, and are drained, without the API server."""
_SOONEST_S = 0.05


@dataclass(frozen=True, slots=True)
class _Report:
    """What a pass has to say, refusals apart, which may come later."""

    picture: Picture
    plan: Plan
    answers: Answers
    rendered: RenderPlan | None
    scheduler: Object | None


class ClusterPass:
    """One pass over one cluster: made for its world as gathered, and run once."""

    def __init__(self, tools: Tools, key: Key, world: World, memory: Memory, now_s: float) -> None:
        """Take the world and the time, Unix seconds, that all of the pass goes by."""
        self._tools = tools
        self._client = tools.client
        self._status = tools.status
        self._key = key
        self._world = world
        self._memory = memory
        self._findings: list[Finding] = []
        self._standalone = StandalonePools(self._status, world.pools, world.cluster, world.pods)
        self._pools = self._standalone.live
        self._now_s = now_s
        # Also where the spec cannot be read, or the cluster goes: what runs is to be asked, and emptied.
        self._token = kept_admin_token(world)
        self._answers: Answers | None = None
        self._causes: Mapping[str, Trouble] = {}
        self._written: dict[str, Object] = {}
        """By uid: objects whose statuses this pass has written."""
        self._left_alone: set[str] = set()
        """Pools that cannot be made or replaced yet."""

    async def run(self) -> Result:
        """Do it.

        Raises:
            KubeError: the API server has trouble, or the world has moved on: pass again.
            SchedulersAwayError: as that.
            NamespaceEndsError: nothing can be made any more.
        """
        cluster = self._world.cluster
        if cluster is None or is_terminating(cluster) or self._world.namespace_terminating:
            # Owner references take its objects along: to make or mend anything now would never end.
            return await self._let_go(cluster)
        read = read_cluster(cluster)
        if isinstance(read, Finding):
            # What runs goes on as it is: half of an unreadable wish is worse than the last readable one.
            self._findings.append(read)
            return await self._plan_pools(None)
        return await self._keep(cluster, read)

    @property
    def _scheduler(self) -> tuple[str, str]:
        return "Deployment", f"{self._key.name}-scheduler"

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
                    keeper.keep_and_prune(desired, self._cluster_pods(), besides=inline),
                    self._keep_history(rendered, cluster, read, history),
                ]
            )
            self._findings += [*keeper.outcome.findings, *history]
            secret = "Secret", rendered.redis_name
            kept = secret in keeper.outcome.live or kept_redis_password(self._world, read)
            if rendered.manages_redis and not kept:
                # Its password is known to nobody, and would be another one in each pass.
                self._left_alone.add(rendered.redis_name)
        else:
            self._findings += keeper.outcome.findings
        self._memory.applier.forget_all_but({uid_of(obj) for obj in keeper.outcome.live.values()})
        return await self._plan_pools(rendered, keeper.outcome.live.get(self._scheduler))

    async def _check_secrets(self, read: MooncakeCluster) -> None:
        self._findings += await secret_findings(self._client, read)

    async def _keep_history(
        self, rendered: RenderPlan, cluster: Object, read: MooncakeCluster, findings: list[Finding]
    ) -> None:
        findings += await keep_history(self._client, self._world, rendered, cluster, read, self._pools)

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
        if standalone is None:
            return None, None
        images = self._tools.images
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
        scheduler = scheduler or self._world.find(*self._scheduler)
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
        return self._result(made, execution.halted)

    def _execution(self, picture: Picture, rendered: RenderPlan | None) -> Execution:
        owned = self._world.owned or {}
        return Execution(
            self._client,
            self._tools.schedulers,
            self._tools.events,
            namespace=self._key.namespace,
            plan=rendered,
            pools={pool.name: pool for pool in picture.desired.pools},
            owners=self._as_written(picture.owners),
            revisions=[obj for (kind, _), obj in owned.items() if kind == "ControllerRevision"],
            scheduler_pods=self._cluster_pods(),
            token=self._token,
            left_alone=self._left_alone,
        )

    async def _report(self, report: _Report, refusals: Mapping[str, Sequence[Finding]]) -> None:
        """Write all statuses."""
        picture = report.picture
        context = Context(picture, report.plan, refusals, report.answers, self._tools.measure_s)
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
                findings=[*self._findings, *refusals.get("", ())],
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

    def _result(self, made: Plan, halted: Collection[str]) -> Result:
        now_s = self._now_s
        times = [_MENDED_S] if self._findings or self._memory.refusals else []
        if made.look_again_s is not None:
            times.append(made.look_again_s - now_s)
        if (look_s := next_look_s(self._cluster_pods(), now_s)) is not None:
            times.append(look_s - now_s)
        gated = [o for o in made.outcomes.values() if o.pool.gated]
        if gated:
            settling = any(
                i.phase in (Phase.READY, Phase.DRAINING) and i.name not in halted
                for outcome in gated
                for i in outcome.instances
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
