"""A cluster's instances as a plan would leave them: every move is tried here before it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_core.registry import Role
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.instances import Instance, Phase
from mooncake_operator.planning.observed import Observed

UNSCHEDULABLE_PATIENCE_S = 30.0
"""How long a surge instance may lack a node before room is made for it instead."""
_SETTLED = (Phase.ROUTABLE, Phase.LOST)


@dataclass(slots=True)
class PoolDraft:
    """One pool: who is there, and what has been decided so far."""

    pool: DesiredPool
    instances: Sequence[Instance]
    old_revision: str = ""
    """Revision of those that are not to be updated yet; empty = no such is known."""
    gpus_by_revision: Mapping[str, int] = field(default_factory=dict)
    """GPUs of one instance, of the revisions that are on record."""
    live: list[Instance] = field(default_factory=list)
    retired: dict[str, str] = field(default_factory=dict)
    """Instance → reason."""
    recalled: list[Instance] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    """Revisions of the instances to make."""
    blocked: Finding | None = None
    """Why the pool does not move on, if it should."""

    def __post_init__(self) -> None:
        self.live = [instance for instance in self.instances if instance.live]

    def gpus_of(self, revision: str) -> int:
        """GPUs that one more instance of a revision takes."""
        return self.gpus_by_revision.get(revision, self.pool.gpus)

    @property
    def total(self) -> int:
        """Instances that count as replicas."""
        return len(self.live) + len(self.recalled) + len(self.created)

    @property
    def updated(self) -> int:
        """Those of the newest revision, whether they work yet or not."""
        present = sum(instance.updated for instance in (*self.live, *self.recalled))
        return present + self.created.count(self.pool.revision)

    @property
    def outdated(self) -> int:
        """Those of any other revision."""
        return self.total - self.updated

    @property
    def places(self) -> int:
        """Instances that count, and those that were chosen to go and have not gone: what `maxSurge` bounds.

        Of whichever revision they are: after an undo those that were replaced are of the newest again, and
        hold their GPUs all the same.
        """
        kept = {instance.name for instance in self.recalled}
        leaving = sum(i.leaving and i.name not in kept for i in self.instances)
        # Those retired in this very plan have not gone either, unless they have no Pods.
        retired = sum(bool(i.pods) for i in self.instances if i.name in self.retired)
        return self.total + leaving + retired

    @property
    def updated_unavailable(self) -> int:
        """Those of the newest revision that no scheduler uses yet."""
        return self.updated - sum(i.updated and i.routable for i in self.live)

    @property
    def rolling(self) -> bool:
        """Whether more instances are to be replaced."""
        return self.outdated > self.pool.partition and not self.pool.paused

    @property
    def progress(self) -> float:
        """Share of the update that schedulers already use; 1 = there is nothing to update."""
        if self.outdated <= self.pool.partition or self.pool.updated_target == 0:
            return 1.0
        working = sum(i.updated and i.routable for i in self.live)
        return min(working / self.pool.updated_target, 1.0)

    @property
    def lacks_nodes(self) -> bool:
        """Whether an updated instance finds no node: a surge that the machines have no room for."""
        return any(
            pod.trouble is not None
            and pod.trouble.reason in (reasons.UNSCHEDULABLE, reasons.SCHEDULING_GATED)
            and self._now_s - pod.trouble.since_s >= UNSCHEDULABLE_PATIENCE_S
            for instance in self.live
            if instance.updated and not instance.routable
            for pod in instance.pods
        )

    _now_s: float = 0.0


class Draft:
    """All pools together, with the sums that bind them."""

    def __init__(
        self, cluster: DesiredCluster, instances: Mapping[str, Sequence[Instance]], observed: Observed
    ) -> None:
        self.cluster = cluster
        self.now_s = observed.now_s
        self.pools = {
            pool.name: PoolDraft(
                pool,
                instances[pool.name],
                _old_revision(pool, observed),
                _gpus_by_revision(pool, observed),
                _now_s=observed.now_s,
            )
            for pool in cluster.pools
            if pool.deleted_s is None
        }
        self.gpus_used = sum(i.gpus for found in instances.values() for i in found)
        self._everyone = [i for found in instances.values() for i in found]
        self._roles = {p.pool.role for p in self.pools.values() if p.pool.gated and p.pool.replicas}
        self._available: dict[str, Counter[str]] = {
            name: Counter(i.pairing for i in draft.live if i.routable) for name, draft in self.pools.items()
        }

    @property
    def moved(self) -> bool:
        """Whether anything has been decided."""
        return any(d.retired or d.created or d.recalled for d in self.pools.values())

    @property
    def in_transition(self) -> bool:
        """Whether some instance is on its way: then waiting may be all that is needed."""
        return any(i.phase not in _SETTLED for i in self._everyone)

    def gpu_room(self, draft: PoolDraft, revision: str) -> bool:
        """Whether the budget has room for one more instance of a revision."""
        budget, more = self.cluster.gpu_budget, draft.gpus_of(revision)
        return budget is None or more == 0 or self.gpus_used + more <= budget

    def create(self, draft: PoolDraft, revision: str) -> None:
        """Make one instance."""
        draft.created.append(revision)
        self.gpus_used += draft.gpus_of(revision)

    def recall(self, draft: PoolDraft, instance: Instance) -> None:
        """Keep an instance that was draining."""
        draft.recalled.append(instance)

    def retire(self, draft: PoolDraft, instance: Instance, reason: str) -> None:
        """Let an instance go. Its GPUs stay in use until its Pods are gone, unless it has none."""
        draft.retired[instance.name] = reason
        draft.live.remove(instance)
        if instance.phase is Phase.ABSENT:
            self.gpus_used -= instance.gpus
        if instance.routable:
            self._available[draft.pool.name][instance.pairing] -= 1

    def available(self, without: Instance | None = None) -> dict[str, int]:
        """Routable instances by pool."""
        return self._count(without, paired=False)

    def usable(self, without: Instance | None = None) -> dict[str, int]:
        """Routable instances by pool that have partners of their own revision in every other role."""
        return self._count(without, paired=True)

    def _count(self, without: Instance | None, *, paired: bool) -> dict[str, int]:
        gone = without if without is not None and without.routable else None
        complete = self._complete_generations(gone) if paired else None
        counts = {}
        for name, by_pairing in self._available.items():
            gated = self.pools[name].pool.gated
            counts[name] = sum(
                number
                for pairing, number in by_pairing.items()
                if complete is None or not gated or pairing in complete
            )
            if gone is not None and gone.pool.name == name and (complete is None or gone.pairing in complete):
                counts[name] -= 1
        return counts

    def _complete_generations(self, without: Instance | None) -> set[str]:
        by_role: dict[Role, Counter[str]] = {role: Counter() for role in self._roles}
        for name, by_pairing in self._available.items():
            role = self.pools[name].pool.role
            if role in by_role:
                by_role[role].update(by_pairing)
        if without is not None and without.pool.role in by_role:
            by_role[without.pool.role][without.pairing] -= 1
        generations = set(_keys(by_role.values()))
        return {g for g in generations if all(counter[g] > 0 for counter in by_role.values())}


def _keys(counters: Iterable[Counter[str]]) -> Iterable[str]:
    for counter in counters:
        yield from counter


def _gpus_by_revision(pool: DesiredPool, observed: Observed) -> dict[str, int]:
    """The newest as it is wanted, for it may not be on record yet."""
    own = (r for r in observed.revisions if r.pool == pool.name and r.owner_uid == pool.uid)
    return {**{r.name: r.gpus for r in own}, pool.revision: pool.gpus}


def _old_revision(pool: DesiredPool, observed: Observed) -> str:
    """The revision before the newest, if it can still be made again."""
    current = observed.history(pool.name).current_revision
    recorded = {r.name for r in observed.revisions if r.pool == pool.name and r.owner_uid == pool.uid}
    return current if current != pool.revision and current in recorded else ""
