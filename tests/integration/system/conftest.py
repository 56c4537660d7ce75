"""One cluster with all that can be shared and killed, for the tests of this folder that need no other."""

from collections.abc import Iterator

import pytest

from mooncake_testing.cluster import Cluster, cluster

MANIFEST = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: shared}
spec:
  model: {name: tiny}
  engine:
    type: Simulated
    connector: MooncakeConnector
    blockSize: 512
    simulated: {profile: llama3-70b-8xa800, timeScale: 10}
  slo:
    ttft: {percentile: 90, target: 30s}
    tbt: {percentile: 90, target: 100ms}
  prefillPools: [{name: prefill, replicas: 2, drain: {timeoutSeconds: 20}}]
  decodePools: [{name: decode, replicas: 2, drain: {timeoutSeconds: 20}}]
  kvCachePools: [{name: kv, replicas: 1, segmentSize: 8Ti}]
  scheduler:
    replicas: 2
    redis: {managed: {}}
    routing: {policy: kv-centric}
    admission: {mode: none}
"""


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    """2 prefill, 2 decode, a store, 2 schedulers, Redis and sidecars. Tests leave it whole."""
    with cluster(MANIFEST) as started:
        yield started
