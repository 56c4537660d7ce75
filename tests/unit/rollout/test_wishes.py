"""From a manifest's update, disruption and coordination to the numbers that planning works with."""

import pytest

from mooncake_core.api import ManifestError, load_manifests
from mooncake_core.registry import Role
from mooncake_operator.planning import ClusterNames, Credentials, Images
from mooncake_operator.planning.manifests.plan import plan_of
from mooncake_operator.planning.wishes import Identity, desired_cluster

MANIFEST = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {{name: c}}
spec:
  model: {{name: llama3-70b}}
  engine: {{type: Simulated, connector: MooncakeConnector, simulated: {{profile: llama3-70b-8xa800}}}}
  prefillPools:
  - name: p
    replicas: 4
    resources: {{gpu: {{count: 8}}}}
    instance: {{parallelism: {{tensor: 8}}}}
    update: {update}
    disruption: {{minAvailable: 3}}
  decodePools: [{{name: d, replicas: 2, drain: {{timeoutSeconds: 90}}}}]
  coordination:
    rollout: {{maxSkew: 50%, progressDeadlineSeconds: 60}}
    ratio: {{minPrefillPerDecode: "1"}}
    gpuBudget: 40
"""


def desired(update):
    (cluster,) = load_manifests(MANIFEST.format(update=update))
    plan = plan_of(cluster, ClusterNames(), [], images=Images(), credentials=Credentials())
    identities = {"c-p": Identity("u", 7, 5.0, True), "c-d": Identity("v")}
    return desired_cluster(plan, Identity("w"), identities)


def test_every_number_of_the_manifest_reaches_the_planner():
    wanted = desired("{maxSurge: 2, maxUnavailable: 0, partition: 1, paused: true}")
    assert (wanted.max_skew, wanted.progress_deadline_s, wanted.gpu_budget) == (0.5, 60, 40)
    assert wanted.ratio.allows(2, 2)
    prefill, decode = wanted.pool("c-p"), wanted.pool("c-d")
    assert (prefill.max_surge, prefill.max_unavailable, prefill.partition, prefill.paused) == (2, 0, 1, True)
    assert (prefill.role, prefill.gpus, prefill.min_available) == (Role.PREFILL, 8, 3)
    assert (prefill.uid, prefill.generation, prefill.deleted_s, prefill.has_finalizer) == ("u", 7, 5.0, True)
    assert (decode.drain_timeout_s, decode.max_surge, decode.max_unavailable) == (90, 1, 1)
    assert prefill.pairing == decode.pairing
    assert prefill.revision != decode.revision


def test_how_a_pool_is_updated_changes_no_revision():
    assert desired("{paused: true}").pool("c-p").revision == desired("{maxSurge: 3}").pool("c-p").revision


def test_an_update_that_could_never_move_is_refused_with_what_to_write():
    with pytest.raises(ManifestError, match=r"prefillPools\[0\].update: .*write maxSurge: 1"):
        desired("{maxSurge: 0, maxUnavailable: 0}")
