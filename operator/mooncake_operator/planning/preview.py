"""A plan carried out on the picture, not on the world: to show a rollout's steps, to test that plans end.

`carry_out` does to a picture what the control loop does to Kubernetes and the schedulers; `settle` is a world
in which everything goes well at once: Pods start, instances register, drains end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from mooncake_core.registry import InstanceState, Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import (
    Action,
    AddFinalizer,
    CreatePod,
    DeletePod,
    DeleteRevision,
    MarkDrain,
    RecordRevision,
    RemoveFinalizer,
    SetGate,
    Unmark,
)
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.history import next_history
from mooncake_operator.planning.instances import Phase, assemble
from mooncake_operator.planning.observed import (
    Gate,
    Observed,
    ObservedPod,
    PoolHistory,
    Registration,
    Revision,
)
from mooncake_operator.planning.plan import Plan, plan

_Change: TypeAlias = Callable[[ObservedPod], ObservedPod]

STEP_S = 60.0
_BEYOND_DRAIN_S = 30.0
_MOST_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Step:
    """One round of a rollout: what was there, and what was decided."""

    number: int
    counts: Mapping[str, Mapping[str, int]]
    """Pool → old and new ones that are routable, and all that hold GPUs."""
    gpus: int
    actions: tuple[Action, ...]
    waits_for: tuple[str, ...]


def rollout_of(
    *,
    prefill: int,
    decode: int,
    max_surge: int = 1,
    max_unavailable: int = 1,
    max_skew: float = 0.25,
    partition: int = 0,
    gpus: int = 1,
    gpu_budget: int | None = None,
) -> tuple[DesiredCluster, Observed]:
    """A cluster at rest whose model or engine has just been changed, and the picture of it."""

    def pool(role: Role, replicas: int, revision: str) -> DesiredPool:
        return DesiredPool(
            name=role.value,
            uid=f"uid-of-{role.value}",
            role=role,
            replicas=replicas,
            revision=revision,
            pairing=revision,
            gpus_per_pod=gpus,
            max_surge=max_surge,
            max_unavailable=max_unavailable,
            partition=partition,
        )

    def cluster(revision: str) -> DesiredCluster:
        pools = (pool(Role.PREFILL, prefill, revision), pool(Role.DECODE, decode, revision))
        return DesiredCluster(pools, max_skew=max_skew, gpu_budget=gpu_budget)

    old, empty = cluster("old"), Observed(0.0, registry={})
    observed = empty
    # Until it is at rest; `steps` ends at the same moment.
    for _ in steps(old, empty):
        observed = settle(carry_out(old, observed, plan(old, observed)))
    return cluster("new"), observed


def carry_out(cluster: DesiredCluster, observed: Observed, made: Plan) -> Observed:
    """The picture after a plan's statuses and actions."""
    observed = replace(observed, histories=_histories(observed, made))
    for action in made.actions:
        observed = _after(cluster, observed, action)
    return observed


def settle(observed: Observed) -> Observed:
    """The picture once every Pod has started or ended, and every drain is over."""
    pods = tuple(_started(pod) for pod in observed.pods if pod.deleted_s is None)
    leaders = {pod.instance for pod in pods if pod.rank == 0 and pod.containers_ready}
    known = observed.registry or {}
    registry = {
        name: replace(known[name], in_flight=0) if name in known else Registration(InstanceState.READY)
        for name in sorted(leaders)
    }
    return replace(observed, pods=pods, registry=registry, now_s=observed.now_s + STEP_S)


def steps(cluster: DesiredCluster, observed: Observed) -> Iterator[Step]:
    """All rounds until nothing is left to do.

    Raises:
        RuntimeError: there is no end, which is a fault of the planner.
    """
    for number in range(1, _MOST_STEPS):
        made = plan(cluster, observed)
        counts, gpus = _counts(cluster, observed)
        yield Step(
            number,
            counts,
            gpus,
            made.actions,
            tuple(w.message for w in made.waits if w.reason != reasons.ROLLING_OUT),
        )
        if not made.actions and not _unsettled(cluster, observed):
            return
        observed = settle(carry_out(cluster, observed, made))
    raise RuntimeError(f"no end after {_MOST_STEPS} steps")


def _unsettled(cluster: DesiredCluster, observed: Observed) -> bool:
    phases = {i.phase for pool in cluster.pools for i in assemble(pool, observed)}
    return not phases <= {Phase.ROUTABLE, Phase.LOST}


def _counts(cluster: DesiredCluster, observed: Observed) -> tuple[dict[str, dict[str, int]], int]:
    counts, gpus = {}, 0
    for pool in cluster.pools:
        instances = assemble(pool, observed)
        counts[pool.name] = {
            "old": sum(i.routable and not i.updated for i in instances),
            "new": sum(i.routable and i.updated for i in instances),
            "all": len(instances),
        }
        gpus += sum(i.gpus for i in instances)
    return counts, gpus


def _started(pod: ObservedPod) -> ObservedPod:
    return replace(pod, phase="Running", containers_ready=True, node=pod.node or "node", trouble=None)


def _histories(observed: Observed, made: Plan) -> dict[str, PoolHistory]:
    histories = dict(observed.histories)
    for name, outcome in made.outcomes.items():
        histories[name] = next_history(
            outcome.pool,
            outcome.instances,
            outcome.recreations,
            outcome.last_failures,
            observed.history(name),
            observed.now_s,
        )
    return histories


def _after(cluster: DesiredCluster, observed: Observed, action: Action) -> Observed:
    match action:
        case AddFinalizer() | RemoveFinalizer():
            return observed
        case RecordRevision():
            pool = cluster.pool(action.pool)
            others = [r for r in observed.revisions if (r.pool, r.name) != (pool.name, action.revision)]
            kept = Revision(
                action.revision,
                pool.name,
                action.number,
                pool.pairing,
                pool.uid,
                pool.size,
                pool.gpus_per_pod,
            )
            return replace(observed, revisions=(*others, kept))
        case DeleteRevision():
            left = [r for r in observed.revisions if (r.pool, r.name) != (action.pool, action.revision)]
            return replace(observed, revisions=tuple(left))
        case SetGate():
            gate = Gate(action.status, action.reason, observed.now_s)
            return _with_pod(observed, action.uid, lambda pod: replace(pod, gate=gate))
        case MarkDrain():
            return _marked(observed, action.instance, InstanceState.DRAINING)
        case Unmark():
            return _marked(observed, action.instance, InstanceState.READY)
        case DeletePod():
            return _deleted(cluster, observed, action)
        case CreatePod():
            return _created(cluster, observed, action)


def _with_pod(observed: Observed, uid: str, change: _Change) -> Observed:
    return replace(observed, pods=tuple(change(p) if p.uid == uid else p for p in observed.pods))


def _marked(observed: Observed, instance: str, state: InstanceState) -> Observed:
    if observed.registry is None or instance not in observed.registry:
        return observed
    changed = {**observed.registry, instance: replace(observed.registry[instance], state=state)}
    return replace(observed, registry=changed)


def _deleted(cluster: DesiredCluster, observed: Observed, action: DeletePod) -> Observed:
    def begin(pod: ObservedPod) -> ObservedPod:
        grace_s = cluster.pool(pod.pool).drain_timeout_s + _BEYOND_DRAIN_S
        return pod if pod.deleted_s is not None else replace(pod, deleted_s=observed.now_s + grace_s)

    return _with_pod(observed, action.uid, begin)


def _created(cluster: DesiredCluster, observed: Observed, action: CreatePod) -> Observed:
    if any(pod.name == action.pod for pod in observed.pods):
        return observed
    pool = cluster.pool(action.pool)
    recorded = (r for r in observed.revisions if (r.pool, r.name) == (pool.name, action.revision))
    revision = next(recorded, None)
    if revision is None:
        return observed  # somebody has deleted it meanwhile
    pod = ObservedPod(
        name=action.pod,
        uid=f"{action.pod}@{observed.now_s:g}",
        owner_uid=pool.uid,
        pool=pool.name,
        instance=action.instance,
        rank=action.rank,
        revision=action.revision,
        pairing=revision.pairing,
        leader_uid=action.leader_uid,
        size=revision.size,
        gpus=revision.gpus_per_pod,
        created_s=observed.now_s,
    )
    return replace(observed, pods=(*observed.pods, pod))
