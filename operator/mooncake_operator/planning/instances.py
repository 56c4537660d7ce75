"""From Pods to instances: what belongs together, and how it fares.

An instance is a leading Pod and its workers. It lives and dies as a whole: ranks that lost one of their
number cannot go on (LeaderWorkerSet's RecreateGroupOnPodRestart).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from mooncake_core.registry import InstanceState, Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.desired import DesiredPool
from mooncake_operator.planning.names import instance_of_pod, member_pod
from mooncake_operator.planning.observed import Observed, ObservedPod, Recreation, Registration

LOST_AFTER_S = 300.0
"""How long after its grace a Pod may go on terminating before it counts as gone (a dead kubelet)."""


class Phase(StrEnum):
    """Where an instance stands; the words appear in status."""

    ABSENT = "BackingOff"
    """It failed, its Pods are gone, and it is to be made again."""
    STARTING = "Starting"
    READY = "Ready"
    """Its containers are, and the schedulers do not use it yet."""
    ROUTABLE = "Routable"
    FAILED = "Failed"
    RECREATING = "Recreating"
    """Failed, recorded, its Pods are on their way out."""
    DRAINING = "Draining"
    ENDING = "Terminating"
    LOST = "Lost"
    """Its Pods never end; their place is given away."""


LIVE = frozenset({Phase.ABSENT, Phase.STARTING, Phase.READY, Phase.ROUTABLE, Phase.FAILED, Phase.RECREATING})
"""Phases that count as one of the wanted replicas."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a pool, as observed."""

    name: str
    pool: DesiredPool
    phase: Phase
    revision: str
    pairing: str
    pods: tuple[ObservedPod, ...] = ()
    """By rank."""
    size: int = 1
    """Pods that it consists of, by its own revision."""
    gpus_per_pod: int = 0
    registration: Registration | None = None
    failure: Finding | None = None
    record: Recreation | None = None
    """Of its last failure, this life's or the one before."""

    @property
    def leader(self) -> ObservedPod | None:
        """The Pod of rank 0, if it is there."""
        return self.pods[0] if self.pods and self.pods[0].rank == 0 else None

    @property
    def life(self) -> str:
        """Uid by which this life differs from the next."""
        return _life(self.pods) if self.pods else ""

    @property
    def live(self) -> bool:
        """Whether it counts as one of the wanted replicas."""
        return self.phase in LIVE

    @property
    def routable(self) -> bool:
        """Whether schedulers place work on it."""
        return self.phase is Phase.ROUTABLE

    @property
    def updated(self) -> bool:
        """Whether it is of the pool's newest revision."""
        return self.revision == self.pool.revision

    @property
    def leaving(self) -> bool:
        """Whether it was chosen to go and still holds its place."""
        if self.phase is Phase.DRAINING:
            return True
        if self.phase is not Phase.ENDING:
            return False
        if not self.pool.gated or self.leader is None:
            return True  # a leader that ended first has taken along why it goes
        gate = self.leader.gate
        return gate is not None and gate.reason == reasons.DRAINING

    @property
    def in_flight(self) -> float:
        """Requests that it works on; unknown = as many as can be, so that it is the last to be chosen."""
        return float(self.registration.in_flight) if self.registration else float("inf")

    @property
    def gpus(self) -> int:
        """GPUs that its Pods hold, and those that are kept for the ones it still lacks."""
        if self.phase is Phase.LOST:
            return 0
        held = sum(pod.gpus for pod in self.pods)
        whole = self.size * self.gpus_per_pod
        return max(held, whole) if self.live else held

    def missing_ranks(self) -> list[int]:
        """Ranks that have no Pod."""
        present = {pod.rank for pod in self.pods}
        return [rank for rank in range(self.size) if rank not in present]


def assemble(pool: DesiredPool, observed: Observed) -> list[Instance]:
    """All instances of a pool, by ordinal; foreign Pods, whatever their labels say, are not among them."""
    groups: dict[str, list[ObservedPod]] = defaultdict(list)
    strangers: set[str] = set()
    for pod in observed.pods:
        if is_own(pool, pod):
            groups[pod.instance].append(pod)
        else:
            strangers.add(pod.name)
    records = {record.instance: record for record in observed.history(pool.name).recreations}
    found = [
        _instance(pool, name, sorted(pods, key=lambda pod: pod.rank), strangers, records.get(name), observed)
        for name, pods in groups.items()
    ]
    found += [_absent(pool, record, observed) for name, record in records.items() if name not in groups]
    return sorted(found, key=lambda instance: _ordinal(instance, pool))


def is_own(pool: DesiredPool, pod: ObservedPod) -> bool:
    """Whether a Pod is this pool's: the controller's uid decides, neither name nor label."""
    if not pod.owner_uid or pod.owner_uid != pool.uid:
        return False
    # A store's masters and its nodes are two pools to planning, of one owner.
    return pool.role is not Role.STORE or pod.pool == pool.name


def foreigners(pool: DesiredPool, observed: Observed) -> list[ObservedPod]:
    """Pods that bear the pool's label or one of its names and belong to somebody else."""
    return [
        pod
        for pod in observed.pods
        if not is_own(pool, pod)
        and (pod.pool == pool.name or pool.ordinal(instance_of_pod(pod.name)) is not None)
    ]


def names_taken(observed: Observed) -> set[str]:
    """Names of instances one of whose Pods would find its name taken."""
    return {instance_of_pod(pod.name) for pod in observed.pods}


def is_lost(pod: ObservedPod, now_s: float) -> bool:
    """Whether a Pod should have ended long ago."""
    return pod.deleted_s is not None and now_s >= pod.deleted_s + LOST_AFTER_S


def _ordinal(instance: Instance, pool: DesiredPool) -> tuple[int, str]:
    ordinal = pool.ordinal(instance.name)
    return (ordinal if ordinal is not None else 1 << 30, instance.name)


def _instance(
    pool: DesiredPool,
    name: str,
    pods: Sequence[ObservedPod],
    strangers: Set[str],
    record: Recreation | None,
    observed: Observed,
) -> Instance:
    registration = (observed.registry or {}).get(name)
    failure = _failure(pods, strangers) or _revision_gone(pool, pods, observed)
    phase = _phase(pool, pods, failure, record, registration, observed)
    return Instance(
        name=name,
        pool=pool,
        phase=phase,
        revision=pods[0].revision,
        pairing=pods[0].pairing,
        pods=tuple(pods),
        size=pods[0].size,
        gpus_per_pod=pods[0].gpus,
        registration=registration,
        failure=failure,
        record=record,
    )


def _absent(pool: DesiredPool, record: Recreation, observed: Observed) -> Instance:
    """An instance without Pods, of the size that it had and will have again."""
    known = observed.revision(pool.name, pool.uid, record.revision)
    return Instance(
        record.instance,
        pool,
        Phase.ABSENT,
        record.revision,
        record.pairing,
        size=known.size if known is not None else pool.size,
        gpus_per_pod=known.gpus_per_pod if known is not None else pool.gpus_per_pod,
        record=record,
    )


def _phase(
    pool: DesiredPool,
    pods: Sequence[ObservedPod],
    failure: Finding | None,
    record: Recreation | None,
    registration: Registration | None,
    observed: Observed,
) -> Phase:
    if all(is_lost(pod, observed.now_s) for pod in pods):
        return Phase.LOST
    recorded = record is not None and record.life == _life(pods)
    if any(pod.deleted_s is not None for pod in pods):
        return Phase.RECREATING if recorded else Phase.ENDING
    gate = pods[0].gate
    if gate is not None and not gate.status and gate.reason == reasons.DRAINING:
        return Phase.DRAINING
    if failure is not None or recorded:
        return Phase.FAILED
    if len(pods) < pods[0].size or not all(pod.containers_ready for pod in pods):
        return Phase.STARTING
    if not pool.gated:
        return Phase.ROUTABLE
    # What the registry says now counts before what the gate will be told in this very plan.
    drained = registration is not None and registration.state is InstanceState.DRAINING
    return Phase.ROUTABLE if gate is not None and gate.status and not drained else Phase.READY


def _life(pods: Sequence[ObservedPod]) -> str:
    """The leader's uid, which its workers bear too: a leader that ends first takes no record along."""
    first = pods[0]
    return first.uid if first.rank == 0 else first.leader_uid or first.uid


def _failure(pods: Sequence[ObservedPod], strangers: Set[str]) -> Finding | None:
    for pod in pods:
        if pod.phase in ("Failed", "Succeeded"):
            how = f"{pod.ending.reason}: {pod.ending.message}" if pod.ending else "no reason was given"
            return Finding(reasons.TERMINAL_POD, f"Pod {pod.name} on {pod.node or 'no node'} ended ({how})")
    if pods[0].size == 1:
        return None
    for pod in pods:
        if pod.engine_restarts:
            how = f" ({pod.ending.reason}: {pod.ending.message})" if pod.ending else ""
            return Finding(
                reasons.ENGINE_RESTARTED,
                f"the engine of Pod {pod.name} on {pod.node or 'no node'} restarted{how}",
            )
    return _broken_ranks(pods) or _name_taken(pods, strangers)


def _broken_ranks(pods: Sequence[ObservedPod]) -> Finding | None:
    leader = pods[0]
    if leader.rank != 0:
        return Finding(reasons.RANK_LOST, f"the leading Pod of {leader.instance} is gone")
    strangers = [pod.name for pod in pods[1:] if pod.leader_uid != leader.uid]
    if strangers:
        return Finding(reasons.RANK_LOST, f"Pod {strangers[0]} was started with an earlier leader")
    # The gate opens when all ranks are ready; before that, a missing one is simply made.
    began = leader.gate is not None and leader.gate.reason != reasons.NOT_REGISTERED
    if began and len(pods) < leader.size:
        return Finding(reasons.RANK_LOST, f"{leader.instance} has {len(pods)} of {leader.size} Pods left")
    return None


def _name_taken(pods: Sequence[ObservedPod], strangers: Set[str]) -> Finding | None:
    """A rank that can never be made: then the whole instance goes, and comes back under another number."""
    if len(pods) == pods[0].size:
        return None
    wanted = (member_pod(pods[0].instance, rank) for rank in range(pods[0].size))
    taken = next((name for name in wanted if name in strangers), None)
    if taken is None:
        return None
    return Finding(reasons.FOREIGN_POD, f"Pod {taken} is wanted as a rank and belongs to somebody else")


def _revision_gone(pool: DesiredPool, pods: Sequence[ObservedPod], observed: Observed) -> Finding | None:
    """Nothing is left to make the missing ranks from: then the whole instance comes back as the newest.

    The newest revision itself is recorded again.
    """
    revision = pods[0].revision
    if len(pods) == pods[0].size or revision == pool.revision:
        return None
    if observed.revision(pool.name, pool.uid, revision) is not None:
        return None
    return Finding(
        reasons.RANK_LOST, f"{pods[0].instance} lacks Pods, and its ControllerRevision {revision} is gone"
    )
