"""How pools go: emptied first, within their deadline, and held by nothing once their namespace goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mooncake_operator.planning import gates, reasons
from mooncake_operator.planning.actions import (
    Action,
    DeletePod,
    DeleteRevision,
    RemoveFinalizer,
    WaitFor,
)
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.instances import Instance, Phase
from mooncake_operator.planning.observed import Observed

AFTER_DRAIN_S = 60.0
"""How long the finalizer still waits for Pods to end when the drain's time is over."""


def plan_deletion(
    pool: DesiredPool, instances: Sequence[Instance], observed: Observed
) -> Iterator[Action | WaitFor]:
    """The next steps of a pool that was deleted, or whose namespace was; nothing is ever made here."""
    if observed.namespace_terminating:
        if pool.deleted_s is not None and pool.has_finalizer:
            yield RemoveFinalizer(pool.name, "its namespace is being deleted, with everything in it")
        return
    started_s = pool.deleted_s if pool.deleted_s is not None else observed.now_s
    cut_s = started_s + pool.drain_timeout_s
    present = [instance for instance in instances if instance.pods and instance.phase is not Phase.LOST]
    for instance in present:
        yield from _let_go(instance, observed, cut_s)
    if not pool.has_finalizer:
        return
    if not present:
        yield RemoveFinalizer(pool.name, "all its instances are gone")
    elif observed.now_s >= cut_s + AFTER_DRAIN_S:
        names = ", ".join(instance.name for instance in present)
        yield RemoveFinalizer(pool.name, f"its time is over; still ending: {names}")
    else:
        message = f"{len(present)} instances are still there"
        until_s = cut_s if observed.now_s < cut_s else cut_s + AFTER_DRAIN_S
        yield WaitFor(reasons.DELETING, pool.name, message, until_s)


def plan_leftovers(cluster: DesiredCluster, observed: Observed) -> Iterator[Action]:
    """What the cluster itself still owns of pools that it no longer asks for, such as its managed Redis.

    Pools that are objects take their Pods along, by way of their owner references.
    """
    if not cluster.uid:
        return
    wanted = {pool.name for pool in cluster.pools}
    for pod in observed.pods:
        if pod.owner_uid == cluster.uid and pod.pool not in wanted and pod.deleted_s is None:
            message = f"the cluster no longer asks for {pod.pool}"
            yield DeletePod(pod.name, pod.uid, pod.instance, reasons.NO_LONGER_WANTED, message)
    for revision in observed.revisions:
        if revision.owner_uid == cluster.uid and revision.pool and revision.pool not in wanted:
            yield DeleteRevision(revision.pool, revision.name)


def _let_go(instance: Instance, observed: Observed, cut_s: float) -> Iterator[Action | WaitFor]:
    is_over = (
        not instance.pool.gated
        or observed.now_s >= cut_s
        # Without schedulers no stream comes from outside; what an engine still does, its preStop waits for.
        or observed.registry is None
        or instance.registration is None
        or instance.phase in (Phase.FAILED, Phase.ENDING, Phase.RECREATING)
        or (instance.phase is Phase.DRAINING and gates.is_empty(instance, observed))
    )
    if is_over:
        for pod in instance.pods:
            if pod.deleted_s is None:
                yield DeletePod(pod.name, pod.uid, instance.name, reasons.POOL_DELETED)
    elif instance.phase is Phase.DRAINING:
        yield from gates.keep_draining(instance)
    else:
        yield from gates.begin_drain(instance, reasons.POOL_DELETED, f"{instance.pool.name} was deleted")
