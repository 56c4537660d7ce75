"""Carries out a plan's actions: in their order within a pool, and an instance; all else at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby

import structlog

from mooncake_operator.control.gather import CLUSTER_LABEL
from mooncake_operator.control.picture import FINALIZER
from mooncake_operator.control.problems import finding_of_action
from mooncake_operator.control.schedulers import Schedulers
from mooncake_operator.control.together import AT_ONCE, together
from mooncake_operator.kube.applier import MANAGER
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import (
    AlreadyExistsError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import (
    CONTROLLER_REVISION,
    POD,
    Object,
    controller_uid,
    name_of,
    resource_of,
    uid_of,
)
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import (
    Action,
    AddFinalizer,
    CreatePod,
    DeletePod,
    DeleteRevision,
    Finding,
    MarkDrain,
    RecordRevision,
    RemoveFinalizer,
    SetGate,
    Unmark,
)
from mooncake_operator.planning.desired import DesiredPool
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.manifests.revisions import (
    controller_revision,
    owner_reference,
    pod_of,
    revision_name,
)

_log = structlog.get_logger()

_TOLD = 3
"""Refusals of one pool that are told of: what refuses one mostly refuses the others too."""
_ONLY_IN_A_TRIAL = re.compile(r"exceeded quota|does not support dry run")
"""Refusals of a trial that say nothing of the Pod: the old one gives back its share of a quota."""


class Execution:
    """One plan's execution. What only a user can mend becomes a refusal of its pool; the rest goes on."""

    def __init__(
        self,
        client: Client,
        schedulers: Schedulers,
        events: EventRecorder,
        *,
        namespace: str,
        plan: Plan | None,
        pools: Mapping[str, DesiredPool],
        owners: Mapping[str, Object],
        revisions: Sequence[Object],
        scheduler_pods: Sequence[Object],
        token: str,
        left_alone: Collection[str] = (),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Take the parts.

        Args:
            client: the API server.
            schedulers: take drain marks.
            events: for what users must notice.
            namespace: the cluster's.
            plan: what new revisions are rendered from; None = none will be asked for.
            pools: what was planned for, by name.
            owners: live objects that own the pools' Pods, by pool.
            revisions: live ControllerRevisions of the cluster.
            scheduler_pods: live Pods of the schedulers.
            token: of the schedulers' admin port.
            left_alone: pools of which nothing is to be done, whatever was planned.
            now: for transition times.
        """
        self._client = client
        self._schedulers = schedulers
        self._events = events
        self._namespace = namespace
        self._plan = plan
        self._pools = pools
        self._owners = dict(owners)
        self._revisions = {name_of(revision): revision for revision in revisions}
        self._scheduler_pods = scheduler_pods
        self._token = token
        self._left_alone = left_alone
        self._now = now
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._held: set[str] = set()
        """Pools of which no more Pods are to be made by this plan."""
        self.refusals: dict[str, list[Finding]] = {}
        """By pool, what could not be done and why; under no name what is no pool's of the plan."""
        self.halted: set[str] = set()
        """Instances of which a step was refused, or rests on what was."""

    async def carry_out(self, actions: Sequence[Action]) -> None:
        """Do it all.

        Raises:
            KubeError: the API server has trouble of its own, or the world has moved on: plan again.
            SchedulersAwayError: a drain cannot be told to anyone.
            NamespaceEndsError: nothing can be made any more.
        """
        lanes: dict[str, list[Action]] = defaultdict(list)
        for action in actions:
            lanes[self._pool_of(action)].append(action)
        wanted = [lane for pool, lane in lanes.items() if pool not in self._left_alone]
        await together(map(self._in_order, wanted))
        # Not in the order of the answers: a condition's words are not to change by chance.
        for pool, findings in self.refusals.items():
            self.refusals[pool] = sorted(findings, key=lambda finding: finding.message)[:_TOLD]

    async def _in_order(self, actions: Sequence[Action]) -> None:
        """The actions of one pool. Those of its instances concern one instance each."""
        founded = True
        for kind, alike in groupby(actions, _step):
            group = list(alike)
            if not founded:
                # Whatever would replace what serves cannot be made.
                self.halted.update(_instance_of(action) for action in group if not _gives_back(action))
                group = [action for action in group if _gives_back(action)]
            if kind in (AddFinalizer, RecordRevision):
                founded &= await self._one_by_one(group)
            elif kind is CreatePod:
                # One Pod first: what refuses it would refuse the others too.
                await self._one_by_one(group[:1])
                await together(self._one_by_one([action]) for action in group[1:])
            elif kind is DeletePod:
                await together(map(self._one_by_one, _by_instance(group)))
            else:
                await self._one_by_one(group)

    async def _one_by_one(self, actions: Sequence[Action]) -> bool:
        for action in actions:
            async with self._limit:
                if not await self._is_done(action):
                    self.halted.add(_instance_of(action))
                    return False  # what comes after rests on it
        return True

    async def _is_done(self, action: Action) -> bool:
        try:
            if isinstance(action, RecordRevision) and not await self._can_be_made(action):
                return False
            await self._one(action)
        except (ForbiddenError, InvalidError, UnavailableError) as error:
            await self._refused(action, finding_of_action(action, error))
            return False
        return True

    async def _one(self, action: Action) -> None:
        match action:
            case AddFinalizer():
                await self._finalizer(action.pool, present=True)
            case RemoveFinalizer():
                await self._finalizer(action.pool, present=False)
            case RecordRevision():
                await self._record(action)
            case DeleteRevision():
                await self._forget(action)
            case SetGate():
                await self._gate(action)
            case MarkDrain():
                await self._schedulers.drain(self._scheduler_pods, self._token, action.instance)
            case Unmark():
                await self._schedulers.drain(self._scheduler_pods, self._token, action.instance, end=True)
            case DeletePod():
                await self._delete(action)
            case CreatePod():
                await self._create(action)

    async def _finalizer(self, pool: str, *, present: bool) -> None:
        owner = self._owners.get(pool)
        if owner is None:
            return
        metadata = owner["metadata"]
        others = [item for item in metadata.get("finalizers") or () if item != FINALIZER]
        wanted = [*others, FINALIZER] if present else others
        if wanted == (metadata.get("finalizers") or []):
            return
        # With the version, nobody else's finalizer is lost.
        body = {"metadata": {"finalizers": wanted, "resourceVersion": metadata["resourceVersion"]}}
        resource = resource_of(owner)
        try:
            self._owners[pool] = await self._client.patch(
                resource, self._namespace, name_of(owner), body, how="merge", manager=MANAGER
            )
        except NotFoundError:
            return

    async def _can_be_made(self, action: RecordRevision) -> bool:
        """Whether a Pod of a new revision would be taken, where the old one must go before it is made.

        Else a mistake in a template would be told once the only Redis is gone.
        """
        pool = self._pools[action.pool]
        if self._plan is None or pool.max_surge or action.number == 1:
            return True
        owner = owner_reference(self._owners[action.pool])
        instance = pool.instance(0)
        trial = CreatePod(instance, action.pool, instance, 0, action.revision)
        pod = pod_of(controller_revision(self._plan, pool, action.number, owner), trial, owner)
        pod["metadata"]["namespace"] = self._namespace
        try:
            await self._client.create(pod, manager=MANAGER, dry_run=True)
        except AlreadyExistsError:
            return True  # what is wrong with a Pod is found before its name is looked up
        except (ForbiddenError, InvalidError, UnavailableError) as error:
            if _ONLY_IN_A_TRIAL.search(str(error)):
                return True
            await self._refused(action, finding_of_action(trial, error))
            return False
        return True

    async def _record(self, action: RecordRevision) -> None:
        if self._plan is None:
            return
        owner = self._owners[action.pool]
        wanted = controller_revision(
            self._plan, self._pools[action.pool], action.number, owner_reference(owner)
        )
        name = name_of(wanted)
        try:
            self._revisions[name] = await self._client.create(wanted, manager=MANAGER)
        except AlreadyExistsError:
            live = await self._client.get(CONTROLLER_REVISION, self._namespace, name)
            if controller_uid(live) != uid_of(owner):
                raise  # an earlier pool of this name: it is on its way out
            if live["revision"] != action.number:
                live = await self._renumbered(live, wanted)
            self._revisions[name] = live

    async def _renumbered(self, live: Object, wanted: Object) -> Object:
        """A revision that is the newest again. A patch would rewrite `data`, of which no byte may change."""
        with contextlib.suppress(NotFoundError):
            await self._client.delete(CONTROLLER_REVISION, self._namespace, name_of(live), uid=uid_of(live))
        return await self._client.create(wanted, manager=MANAGER)

    async def _forget(self, action: DeleteRevision) -> None:
        live = self._revisions.get(revision_name(action.pool, action.revision))
        if live is not None:
            try:
                await self._client.delete(
                    CONTROLLER_REVISION, self._namespace, name_of(live), uid=uid_of(live)
                )
            except (NotFoundError, PreconditionError):
                return

    async def _gate(self, action: SetGate) -> None:
        stamp = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        gate = {
            "type": reasons.GATE,
            "status": str(action.status),
            "reason": action.reason,
            "message": action.message,
            # Also when only the reason changes: a drain began then.
            "lastTransitionTime": stamp,
        }
        body = {"metadata": {"uid": action.uid}, "status": {"conditions": [gate]}}
        try:
            await self._client.patch(
                POD, self._namespace, action.pod, body, how="strategic", manager=MANAGER, subresource="status"
            )
        except (NotFoundError, PreconditionError):
            # The Pod is gone; its successor has a gate of its own.
            return

    async def _delete(self, action: DeletePod) -> None:
        _log.info("deleting a Pod", pod=action.pod, namespace=self._namespace, why=action.reason)
        try:
            await self._client.delete(POD, self._namespace, action.pod, uid=action.uid)
        except (NotFoundError, PreconditionError):
            return
        owner = next((o for pool, o in self._owners.items() if self._is_of(pool, action.instance)), None)
        if owner is not None:
            failed = action.reason in (reasons.INSTANCE_FAILED, reasons.INSTANCE_BROKEN)
            note = f"Pod {action.pod} of {action.instance}: {action.message or action.reason}"
            await self._events.record(owner, action.reason, note, kind="Warning" if failed else "Normal")

    async def _create(self, action: CreatePod) -> None:
        if action.pool in self._held:
            return  # the next would be refused for the same reason
        owner = self._owners[action.pool]
        revision = self._revisions.get(revision_name(action.pool, action.revision))
        if revision is None:
            raise PreconditionError(409, "NoRevision", f"{action.pool} has no revision {action.revision} yet")
        pod = pod_of(revision, action, owner_reference(owner))
        pod["metadata"]["namespace"] = self._namespace
        try:
            await self._client.create(pod, manager=MANAGER)
        except AlreadyExistsError:
            await self._look_who_has_the_name(action, pod)

    async def _look_who_has_the_name(self, action: CreatePod, wanted: Object) -> None:
        try:
            live = await self._client.get(POD, self._namespace, action.pod)
        except NotFoundError:
            return
        cluster = wanted["metadata"]["labels"][CLUSTER_LABEL]
        if controller_uid(live) != controller_uid(wanted):
            message = f"Pod {action.pod} exists and is not this pool's; it is left alone, remove or rename it"
            await self._refused(action, Finding(reasons.FOREIGN_POD, message))
        elif (live["metadata"].get("labels") or {}).get(CLUSTER_LABEL) != cluster:
            # By that label Pods are listed: it will not be seen, and its name is not free.
            message = f"Pod {action.pod} is this pool's and lacks the label {CLUSTER_LABEL}={cluster}"
            finding = Finding(reasons.NAME_TAKEN, f"{message}; put it back, or delete the Pod")
            await self._refused(action, finding)

    async def _refused(self, action: Action, finding: Finding) -> None:
        pool = self._pool_of(action)
        self.refusals.setdefault(pool, []).append(finding)
        if isinstance(action, CreatePod):
            self._held.add(pool)
        if (owner := self._owners.get(pool)) is not None:
            verb = type(action).__name__
            await self._events.record(owner, finding.reason, finding.message, kind="Warning", action=verb)

    def _pool_of(self, action: Action) -> str:
        match action:
            case SetGate() | MarkDrain() | Unmark() | DeletePod():
                instance = _instance_of(action)
                return next((pool for pool in self._pools if self._is_of(pool, instance)), "")
        return action.pool if action.pool in self._pools else ""

    def _is_of(self, pool: str, instance: str) -> bool:
        wanted = self._pools.get(pool)
        return wanted is not None and wanted.ordinal(instance) is not None


def _step(action: Action) -> type:
    """What may be carried out side by side: `DeletePod` stands for all that concerns one instance."""
    return DeletePod if isinstance(action, (SetGate, MarkDrain, Unmark, DeletePod)) else type(action)


def _gives_back(action: Action) -> bool:
    """Whether it lets schedulers use an instance."""
    return isinstance(action, Unmark) or (isinstance(action, SetGate) and action.status)


def _instance_of(action: Action) -> str:
    match action:
        case SetGate():
            return action.pod
        case MarkDrain() | Unmark() | DeletePod():
            return action.instance
    return ""


def _by_instance(actions: Iterable[Action]) -> list[list[Action]]:
    found: dict[str, list[Action]] = defaultdict(list)
    for action in actions:
        found[_instance_of(action)].append(action)
    return list(found.values())
