"""The manifest that the design promises: every field of it is known, and what does not work yet says so."""

import subprocess
import sys

import pytest

from mooncake_core.api import ManifestError, load_manifests

PROMISED = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: kimi}
spec:
  model:
    name: kimi-k2
    path: /models/kimi-k2
    volume: {persistentVolumeClaim: {claimName: models, readOnly: true}}
  engine:
    type: vLLM
    image: vllm/vllm-openai:v0.33.0
    connector: MooncakeConnector
    args: [--max-model-len=131072]
  slo: {ttft: {percentile: 90, target: 2s}, tbt: {percentile: 90, target: 100ms}}
  network:
    protocol: RDMA
    fallback: Fail
    mode: DevicePlugin
    resources: [{name: rdma/hca_shared_devices_a, count: 1, semantics: Slot}]
    gid: {index: auto, family: IPv4}
    mtu: {path: 4096}
  prefillPools:
  - name: prefill
    replicas: 4
    instance: {size: 2, parallelism: {tensor: 8, pipeline: 2}}
    resources: {gpu: {resourceName: nvidia.com/gpu, count: 8}, sharedMemory: 64Gi}
    hugepages: {size: 2Mi, perPod: auto}
    autoscaling: {mode: SLO, minReplicas: 2, maxReplicas: 12}
  decodePools:
  - name: decode
    replicas: 8
    instance: {size: 1, parallelism: {tensor: 8}}
    resources: {gpu: {count: 8}}
    drain: {timeoutSeconds: 900, onTimeout: Force}
  kvCachePools:
  - name: kv
    replicas: 6
    segmentSize: 200Gi
    hugepages: {size: 1Gi, perPod: auto}
    ssd: {size: 2Ti, path: /data/kv}
    master: {replicas: 1, eviction: {highWatermark: "0.90", ratio: "0.05"}}
  coordination:
    ratio: {minPrefillPerDecode: "0.25", maxPrefillPerDecode: "2"}
    rollout: {maxSkew: 25%, pairing: SameRevision, progressDeadlineSeconds: 1800}
    roleConversion: {mode: Disabled}
    gpuBudget: 128
  scheduler:
    replicas: 2
    redis: {managed: {}}
    routing: {policy: kv-centric, balancingThreshold: "1.5"}
    admission: {mode: predictive, priorityFloor: 0}
    auth: {apiKeySecretRef: {name: kimi-keys}}
"""

WORKS_TODAY = (
    ("    protocol: RDMA\n", "    protocol: TCP\n"),
    ("    mode: DevicePlugin\n", "    mode: None\n"),
    ("    resources: [{name: rdma/hca_shared_devices_a, count: 1, semantics: Slot}]\n", ""),
    ("    gid: {index: auto, family: IPv4}\n", ""),
    ("    mtu: {path: 4096}\n", ""),
    ("    hugepages: {size: 2Mi, perPod: auto}\n", ""),
    ("    hugepages: {size: 1Gi, perPod: auto}\n", ""),
    ("    autoscaling: {mode: SLO, minReplicas: 2, maxReplicas: 12}\n", ""),
    ("    ssd: {size: 2Ti, path: /data/kv}\n", ""),
)


def test_every_promised_field_is_known_and_refused_only_as_not_yet_supported():
    with pytest.raises(ManifestError) as refused:
        load_manifests(PROMISED)
    assert [line for line in refused.value.problems if "not yet supported" not in line] == []


def test_without_what_is_not_there_yet_the_promised_manifest_is_accepted():
    text = PROMISED
    for promised, today in WORKS_TODAY:
        assert promised in text
        text = text.replace(promised, today)
    (cluster,) = load_manifests(text)
    assert cluster.spec.instances == (4, 8)
    assert cluster.spec.gpus == 4 * 2 * 8 + 8 * 8


def test_more_devices_than_the_budget_are_refused():
    text = PROMISED.replace("gpuBudget: 128", "gpuBudget: 127")
    for promised, today in WORKS_TODAY:
        text = text.replace(promised, today)
    with pytest.raises(ManifestError, match=r"coordination\.gpuBudget: the pools take more GPUs"):
        load_manifests(text)


def test_the_models_need_no_yaml_package():
    program = "import sys, mooncake_core.api, mooncake_core.api.crds; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
