"""What the cluster itself owns and no longer asks for."""

from dataclasses import replace

from mooncake_operator.planning.actions import DeletePod, DeleteRevision
from mooncake_operator.planning.desired import DesiredCluster
from mooncake_operator.planning.observed import Observed, ObservedPod, Revision
from mooncake_operator.planning.plan import plan

REDIS = ObservedPod(
    name="q-redis-0", uid="pod", owner_uid="cluster", pool="q-redis", instance="q-redis-0", revision="r"
)


def observed(*pods: ObservedPod) -> Observed:
    revision = Revision(name="r", pool="q-redis", number=1, owner_uid="cluster")
    history = Revision(name="h", pool="", number=1, owner_uid="cluster")
    return Observed(now_s=100.0, pods=pods, revisions=(revision, history))


def test_pods_and_revisions_of_a_pool_that_is_asked_for_no_longer_go():
    made = plan(DesiredCluster(pools=(), uid="cluster"), observed(REDIS))
    assert next(a for a in made.actions if isinstance(a, DeletePod)).pod == "q-redis-0"
    assert DeleteRevision("q-redis", "r") in made.actions
    assert len(made.actions) == 2, "revisions of the cluster itself are nobody's leftovers"


def test_of_a_cluster_that_cannot_be_read_nothing_is_a_leftover():
    assert plan(DesiredCluster(pools=()), observed(REDIS)).actions == ()


def test_what_already_ends_or_belongs_to_others_is_not_asked_to_end():
    pods = (replace(REDIS, deleted_s=99.0), replace(REDIS, uid="other", owner_uid="somebody"))
    made = plan(DesiredCluster(pools=(), uid="cluster"), observed(*pods))
    assert not [action for action in made.actions if isinstance(action, DeletePod)]
