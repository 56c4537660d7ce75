"""From what is wanted and what is there to what is to be done: the one entry to planning pools.

A picture, a wish and a time give actions, in the order in which they are to be carried out; once they have
come true, the same call gives none. What a later plan must know of this one stands in statuses, and goes
there first: a failure must be on record before its Pods go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mooncake_operator.planning import gates, reasons, recreation
from mooncake_operator.planning.actions import (
    Action,
    AddFinalizer,
    CreatePod,
    DeletePod,
    DeleteRevision,
    Finding,
    RecordRevision,
    RemoveFinalizer,
    WaitFor,
)
from mooncake_operator.planning.checks import is_idle
from mooncake_operator.planning.deletion import plan_deletion, plan_leftovers
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.draft import Draft, PoolDraft
from mooncake_operator.planning.history import last_progress_s, next_history
from mooncake_operator.planning.instances import LOST_AFTER_S, Instance, Phase, assemble, names_taken
from mooncake_operator.planning.moves import decide, standstill
from mooncake_operator.planning.observed import Observed, PoolHistory, Recreation, Revision

REVISIONS_KEPT = 10
"""Revisions without Pods that are kept for an undo."""


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """What one pool's status is to be made from."""

    pool: DesiredPool
    instances: tuple[Instance, ...]
    recreations: tuple[Recreation, ...] = ()
    last_failures: tuple[Recreation, ...] = ()
    blocked: Finding | None = None
    stuck: Finding | None = None
    """Why it will never get on by itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about a cluster's pools."""

    actions: tuple[Action, ...]
    waits: tuple[WaitFor, ...]
    outcomes: Mapping[str, PoolOutcome] = field(default_factory=dict)

    @property
    def look_again_s(self) -> float | None:
        """When something that no event announces may have changed."""
        return min((wait.until_s for wait in self.waits if wait.until_s is not None), default=None)


def plan(cluster: DesiredCluster, observed: Observed) -> Plan:
    """Work out the next actions for all pools of a cluster."""
    instances = {pool.name: assemble(pool, observed) for pool in cluster.pools}
    actions: list[Action] = []
    waits: list[WaitFor] = []
    outcomes: dict[str, PoolOutcome] = {}
    drafts: dict[str, PoolDraft] = {}
    draft = Draft(cluster, instances, observed)
    if not observed.namespace_terminating:
        decide(draft)
        drafts = draft.pools
        actions += plan_leftovers(cluster, observed)
    for pool in cluster.pools:
        own = tuple(instances[pool.name])
        if pool.deleted_s is not None or observed.namespace_terminating:
            steps: Iterator[Action | WaitFor] = plan_deletion(pool, own, observed)
            outcomes[pool.name] = PoolOutcome(pool, own)
        else:
            steps = _PoolPlan(drafts[pool.name], observed).steps()
            outcomes[pool.name] = _outcome(draft, drafts[pool.name], observed)
            waits += _deadline(cluster, outcomes[pool.name], observed)
        for step in steps:
            if isinstance(step, WaitFor):
                waits.append(step)
            else:
                actions.append(step)
    return Plan(tuple(actions), tuple(waits), outcomes)


def must_be_reported_first(made: Plan, observed: Observed) -> bool:
    """Whether statuses have to be written before a plan is carried out, or may be meanwhile.

    First where they say what the actions will make forgotten: failures, and which revision was there before.
    And where an action changes the object that has the status, for both writings say which version they mean.
    """
    if any(isinstance(action, AddFinalizer | RemoveFinalizer) for action in made.actions):
        return True
    return any(_has_news(outcome, observed.history(name)) for name, outcome in made.outcomes.items())


def _has_news(outcome: PoolOutcome, before: PoolHistory) -> bool:
    if outcome.recreations != before.recreations:
        return True
    if not before.update_revision:
        return False  # nothing came before, or this pool has no status of its own
    began_s = before.update_started_s
    records, failures = outcome.recreations, outcome.last_failures
    return next_history(outcome.pool, outcome.instances, records, failures, before, began_s) != before


def _outcome(whole: Draft, draft: PoolDraft, observed: Observed) -> PoolOutcome:
    pool, history = draft.pool, observed.history(draft.pool.name)
    given_up = frozenset(draft.retired) | _overtaken(draft, observed)
    records = recreation.next_records(pool, draft.instances, given_up, observed.now_s)
    failures = recreation.next_failures(history, records, history.recreations)
    stuck = standstill(whole, draft)
    return PoolOutcome(pool, tuple(draft.instances), records, failures, draft.blocked, stuck)


def _deadline(cluster: DesiredCluster, outcome: PoolOutcome, observed: Observed) -> list[WaitFor]:
    """Look again when a rollout's time is over, though nothing will have happened."""
    unfinished = any(i.live and not (i.routable and i.updated) for i in outcome.instances)
    history = observed.history(outcome.pool.name)
    due_s = last_progress_s(outcome.instances, history, observed.now_s) + cluster.progress_deadline_s
    if not unfinished or due_s <= observed.now_s:
        return []
    return [WaitFor(reasons.ROLLING_OUT, outcome.pool.name, "its progress deadline", due_s + 1)]


def _overtaken(draft: PoolDraft, observed: Observed) -> frozenset[str]:
    """Absent instances whose name somebody else has taken meanwhile; another number takes their place."""
    taken = names_taken(observed)
    return frozenset(i.name for i in draft.instances if i.phase is Phase.ABSENT and i.name in taken)


class _PoolPlan:
    """One pool's actions from its draft."""

    def __init__(self, draft: PoolDraft, observed: Observed) -> None:
        self.draft = draft
        self.pool = draft.pool
        self.observed = observed
        self._recalled = {instance.name for instance in draft.recalled}

    def steps(self) -> Iterator[Action | WaitFor]:
        """All of them, in order: nothing is made before its revision is kept, and room is made first."""
        if self.pool.gated and not self.pool.has_finalizer:
            yield AddFinalizer(self.pool.name)
        yield from self._revisions()
        for instance in self.draft.instances:
            yield from self._of_instance(instance)
        yield from self._creations()

    def _revisions(self) -> Iterator[Action]:
        own = [r for r in self.observed.revisions if self._is_own(r)]
        newest = max((r.number for r in own), default=0)
        recorded = next((r for r in own if r.name == self.pool.revision), None)
        if recorded is None or recorded.number < newest:
            yield RecordRevision(self.pool.name, self.pool.revision, newest + 1)
        history = self.observed.history(self.pool.name)
        used = {self.pool.revision, history.current_revision, history.update_revision}
        used |= {instance.revision for instance in self.draft.instances}
        idle = sorted((r for r in own if r.name not in used), key=lambda r: r.number)
        for revision in idle[: max(len(idle) - REVISIONS_KEPT, 0)]:
            yield DeleteRevision(self.pool.name, revision.name)

    def _of_instance(self, instance: Instance) -> Iterator[Action | WaitFor]:
        reason = self.draft.retired.get(instance.name)
        if reason is not None:
            yield from self._retire(instance, reason)
        elif instance.name in self._recalled:
            yield from gates.end_drain(instance)
        elif instance.phase is Phase.DRAINING:
            yield from self._draining(instance)
        elif instance.phase in (Phase.ENDING, Phase.RECREATING, Phase.LOST):
            yield from self._ending(instance)
        elif instance.phase is Phase.FAILED:
            yield from self._failed(instance)
        elif instance.phase is Phase.ABSENT:
            yield from self._absent(instance)
        else:
            yield from self._present(instance)

    def _retire(self, instance: Instance, reason: str) -> Iterator[Action | WaitFor]:
        detail = f"{self.pool.name} wants {self.pool.replicas} instances of revision {self.pool.revision}"
        if (
            (instance.phase is Phase.ROUTABLE and not self.pool.gated)
            or instance.phase in (Phase.FAILED, Phase.ABSENT, Phase.RECREATING)
            or is_idle(instance)
        ):
            # Where its Pods take long to end, later plans must still know that it was chosen to go.
            yield from gates.close(instance, reason, detail)
            yield from _delete(instance, reason, detail)
        else:
            yield from gates.begin_drain(instance, reason, detail)
            until_s = gates.drain_deadline_s(instance, self.observed.now_s)
            yield WaitFor(reasons.WAITING_FOR_DRAIN, instance.name, detail, until_s)

    def _draining(self, instance: Instance) -> Iterator[Action | WaitFor]:
        leader = instance.leader
        since_s = leader.gate.since_s if leader is not None and leader.gate is not None else 0.0
        deadline_s = gates.drain_deadline_s(instance, since_s)
        if self.observed.now_s >= deadline_s:
            yield from _delete(instance, reasons.DRAINING, "the drain timeout is over; what is left is cut")
        elif gates.is_empty(instance, self.observed):
            yield from _delete(instance, reasons.DRAINING, "nothing is in flight any more")
        else:
            yield from gates.keep_draining(instance)
            message = "its schedulers do not answer"
            if instance.registration is not None:
                message = f"{instance.registration.in_flight} requests are in flight"
            yield WaitFor(reasons.WAITING_FOR_DRAIN, instance.name, message, deadline_s)

    def _ending(self, instance: Instance) -> Iterator[Action | WaitFor]:
        yield from _delete(instance, reasons.INSTANCE_BROKEN, "another Pod of the instance is ending")
        if instance.phase is Phase.LOST:
            message = "its Pods do not end; their place is given away, their GPUs count as free"
            yield WaitFor(reasons.NOT_TERMINATING, instance.name, message)
            return
        until_s = max((p.deleted_s for p in instance.pods if p.deleted_s is not None), default=0.0)
        yield WaitFor(reasons.TERMINATING, instance.name, "its Pods are ending", until_s + LOST_AFTER_S)

    def _failed(self, instance: Instance) -> Iterator[Action | WaitFor]:
        message = instance.failure.message if instance.failure else "it failed"
        if not recreation.is_recorded(instance):
            yield WaitFor(reasons.RECORDING_FAILURE, instance.name, message, self.observed.now_s)
            return
        yield from _delete(instance, reasons.INSTANCE_FAILED, message)

    def _absent(self, instance: Instance) -> Iterator[Action | WaitFor]:
        record = instance.record
        if record is None or instance.name in _overtaken(self.draft, self.observed):
            return
        due_s = recreation.due_s(record)
        if self.observed.now_s < due_s:
            message = f"failed {record.failures} times in a row, the last time: {record.message}"
            yield WaitFor(reasons.BACKING_OFF, instance.name, message, due_s)
            return
        yield self._leader(instance.name, self._known(record.revision))

    def _present(self, instance: Instance) -> Iterator[Action | WaitFor]:
        leader = instance.leader
        if instance.phase is Phase.STARTING and leader is not None:
            for rank in instance.missing_ranks():
                pod = self.pool.pod(instance.name, rank)
                yield CreatePod(
                    pod, self.pool.name, instance.name, rank, instance.revision, leader_uid=leader.uid
                )
        if self.pool.gated:
            yield from gates.settle_gate(instance, self.observed)
        if instance.record is not None and instance.phase is Phase.ROUTABLE:
            gate = leader.gate if leader is not None else None
            until_s = (gate.since_s if gate else self.observed.now_s) + recreation.STABLE_S
            yield WaitFor(reasons.BACKING_OFF, instance.name, "not stable for long yet", until_s)

    def _creations(self) -> Iterator[Action | WaitFor]:
        taken = names_taken(self.observed)
        taken |= {i.name for i in self.draft.instances if i.name not in self.draft.retired}
        ordinal = 0
        for revision in self.draft.created:
            while self.pool.instance(ordinal) in taken:
                ordinal += 1
            yield self._leader(self.pool.instance(ordinal), revision)
            ordinal += 1
        blocked = self.draft.blocked
        if blocked is not None:
            yield WaitFor(blocked.reason, self.pool.name, blocked.message, self._unblocks_s())

    def _unblocks_s(self) -> float | None:
        if not self.pool.join_interval_s:
            return None
        created = [pod.created_s for i in self.draft.instances for pod in i.pods]
        return max(created, default=self.observed.now_s) + self.pool.join_interval_s

    def _leader(self, instance: str, revision: str) -> CreatePod:
        return CreatePod(self.pool.pod(instance, 0), self.pool.name, instance, 0, revision)

    def _known(self, revision: str) -> str:
        """The revision, or the newest where it is on record no more."""
        recorded = {r.name for r in self.observed.revisions if self._is_own(r)}
        return revision if revision in recorded else self.pool.revision

    def _is_own(self, revision: Revision) -> bool:
        return revision.pool == self.pool.name and revision.owner_uid == self.pool.uid


def _delete(instance: Instance, reason: str, message: str) -> Iterator[DeletePod]:
    for pod in instance.pods:
        if pod.deleted_s is None:
            yield DeletePod(pod.name, pod.uid, instance.name, reason, message)
