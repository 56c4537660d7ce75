"""What `mooncakectl validate` takes the API server takes too, and the other way round, near every bound."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mooncake_core.api.manifests import ManifestError, parse_object
from mooncake_testing.apiserver import ApiServer, refusal
from mooncake_testing.wrong_manifests import cluster

Path = tuple[str | int, ...]


def near(*bounds: int) -> list[Any]:
    """Numbers beside and at bounds."""
    return sorted({bound + step for bound in bounds for step in (-1, 0, 1)})


RATIOS = ["0", "0.0", "0.05", "1", "1.0", "1.00", "0.99", "1.01", "1.1", ".5", "1.", "-1", "1e3", "", "0.55"]
SHARES = [*RATIOS, "0.0000000000001"]
QUANTITIES = [
    "0",
    "0.0",
    "1",
    "1m",
    "0.5m",
    "1k",
    "1K",
    "1Ki",
    "1.5Gi",
    "1E",
    "1Gi",
    "2Gi",
    "1024Mi",
    "1e3",
    "",
    "-1Gi",
]
DURATIONS = ["0s", "0ms", "0.0s", "0.001ms", "1s", "1m", "s", "1.5s", "10000000000000ms", "", " 1s", "1s\n"]
NAMES = ["", "a", "A", "a-", "-a", "1a", "a" * 40, "a" * 41, "a.b", "ä", "a\n"]
TEXTS = ["", "x", "x" * 1024, "x" * 1025, "ä" * 1024]
EMPTY = [None, {}, [], "", 0, False]

PLACES: dict[Path, list[Any]] = {
    ("model", "name"): ["", "m", "-m", "m$", "m/n:1", "m" * 253, "m" * 254],
    ("model", "path"): [None, "/", "/m", "m", "/m m", "/" + "m" * 1023, "/" + "m" * 1024],
    ("model", "volume"): [
        *EMPTY,
        {"hostPath": {"path": "/m"}},
        {"hostPath": None, "persistentVolumeClaim": {"claimName": "c"}},
    ],
    ("engine", "type"): ["vLLM", "SGLang", "Simulated", "simulated", None],
    ("engine", "image"): [None, *TEXTS],
    ("engine", "blockSize"): [*near(1, 4096), None, "16", 16.5, True],
    ("engine", "args"): [
        None,
        [],
        [""],
        ["--seed=1"],
        ["--port=1"],
        ["--max_num_seqs=4"],
        ["-tp=2"],
        ["x"] * 64,
        ["x"] * 65,
        [None],
    ],
    ("engine", "simulated"): [
        None,
        {},
        {"timeScale": 0},
        {"timeScale": 1000},
        {"timeScale": 1001},
        {"profile": "x"},
        {"profile": None},
    ],
    ("slo",): EMPTY,
    ("slo", "ttft"): [None, {}, {"target": "1s", "multiplier": None}, {"target": None, "multiplier": None}],
    ("slo", "ttft", "target"): DURATIONS,
    ("slo", "tbt", "multiplier"): RATIOS,
    ("slo", "tbt", "percentile"): near(1, 100),
    ("network",): [
        None,
        {},
        {"protocol": None},
        {"protocol": "RDMA"},
        {"gid": None},
        {"gid": {"index": 3}},
        {"mtu": {"path": 512}},
    ],
    ("prefillPools",): [None, [], [None], {}],
    ("prefillPools", 0, "name"): [*NAMES, "decode", "kv", "redis", "scheduler", "admin"],
    ("prefillPools", 0, "replicas"): [*near(1, 1000), None, 11, 55],
    ("decodePools", 0, "replicas"): [1, 10, 100, 1000],
    ("prefillPools", 0, "resources"): [
        None,
        {},
        {"gpu": {"count": 1}},
        {"gpu": {"count": 8}},
        {"gpu": None},
        {"gpu": {}},
    ],
    ("prefillPools", 0, "instance"): [
        None,
        {},
        {"size": 2},
        {"size": 2, "parallelism": {"tensor": 2}},
        {"parallelism": {"tensor": 8}},
        {"parallelism": {"data": 2}},
        {"parallelism": {"tensor": 1025}},
    ],
    ("prefillPools", 0, "hugepages"): [None, {"size": "2Mi"}],
    ("prefillPools", 0, "autoscaling"): [None, {}, {"mode": "None"}, {"mode": "SLO"}, {"minReplicas": 2}],
    ("prefillPools", 0, "drain", "timeoutSeconds"): near(1, 86_400),
    ("prefillPools", 0, "update"): [
        None,
        {},
        {"maxSurge": 0},
        {"maxSurge": 0, "maxUnavailable": 0},
        {"maxSurge": 1001},
        {"partition": None},
    ],
    ("prefillPools", 0, "disruption", "minAvailable"): [*near(0, 1000), None],
    ("prefillPools", 0, "podTemplate"): [
        None,
        {},
        {"metadata": None},
        {"metadata": {"labels": {"mooncake.io/x": "y"}}},
        {"metadata": {"labels": {"a": "x" * 64}}},
        {"spec": None},
    ],
    ("decodePools", 0, "resources", "memory"): [None, *QUANTITIES],
    ("kvCachePools", 0, "segmentSize"): [None, *QUANTITIES],
    ("kvCachePools", 0, "resources", "memory"): [None, *QUANTITIES],
    ("kvCachePools", 0, "ssd"): [None, {}, {"size": "1Gi", "path": "/s"}, {"size": "1Gi", "path": "s"}],
    ("kvCachePools", 0, "master", "eviction", "highWatermark"): SHARES,
    ("kvCachePools", 0, "master", "eviction", "ratio"): SHARES,
    ("kvCachePools", 0, "master", "replicas"): near(1, 5),
    ("coordination", "ratio"): [None, {}],
    ("coordination", "ratio", "minPrefillPerDecode"): RATIOS,
    ("coordination", "ratio", "maxPrefillPerDecode"): RATIOS,
    ("coordination", "rollout", "maxSkew"): ["0%", "1%", "100%", "101%", "01%", "%", "5", ""],
    ("coordination", "gpuBudget"): [*near(1, 8, 100_000), None],
    ("coordination", "roleConversion"): [None, {}, {"mode": "Restart"}],
    ("scheduler",): EMPTY,
    ("scheduler", "replicas"): [*near(1, 16), None],
    ("scheduler", "podTemplate"): [
        None,
        {},
        {"metadata": {"labels": {"mooncake.io/x": "y"}}},
        {"metadata": {"labels": {"a": "x" * 64}}},
        {"spec": None},
        {"spec": []},
    ],
    ("scheduler", "redis"): [
        {"managed": {"podTemplate": None}},
        {"managed": {"podTemplate": {"spec": {}}}},
        {"managed": {"podTemplate": {"metadata": {"labels": {"mooncake.io/x": "y"}}}}},
        None,
        {},
        {"managed": {}},
        {"managed": None},
        {"managed": {}, "secretRef": {"name": "r"}},
    ],
    ("scheduler", "routing", "policy"): ["kv-centric", "kvcentric", None],
    ("scheduler", "routing", "balancingThreshold"): RATIOS,
    ("scheduler", "routing", "seed"): [*near(0, 2**31 - 1), None],
    ("scheduler", "admission", "priorityFloor"): near(-1000, 1000),
    ("scheduler", "auth", "apiKeySecretRef"): [None, {}, {"name": "k"}, {"name": ""}, {"name": "k" * 254}],
    ("nobody",): [None, 1],
    ("engine", "nobody"): [None, 1],
}


def changed(changes: list[tuple[Path, Any]]) -> dict[str, Any]:
    """A valid cluster with values put into their places, those nearest the root last."""
    manifest = cluster(
        kvCachePools=[{"name": "kv", "segmentSize": "1Gi"}], slo={"tbt": {}, "ttft": {"target": "2s"}}
    )
    for path, value in sorted(changes, key=lambda each: -len(each[0])):
        at: Any = manifest["spec"]
        for step, following in pairwise(path):
            if isinstance(step, str):
                at = at.setdefault(step, [{}] if isinstance(following, int) else {})
            else:
                at = at[step]
        at[path[-1]] = copy.deepcopy(value)
    spec = manifest["spec"]
    if (spec.get("slo") or {}).get("tbt") == {}:
        del spec["slo"]["tbt"]
    return manifest


CHANGES = st.lists(
    st.sampled_from(sorted(PLACES, key=str)).flatmap(
        lambda path: st.tuples(st.just(path), st.sampled_from(PLACES[path]))
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda change: change[0],
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES)
@example(
    changes=[
        (("coordination", "ratio", "minPrefillPerDecode"), "0.28"),
        (("prefillPools", 0, "replicas"), 7),
        (("decodePools", 0, "replicas"), 25),
    ]
)
@example(changes=[(("slo",), None)])
def test_both_take_or_both_refuse(
    api_server: ApiServer, namespace: str, changes: list[tuple[Path, Any]]
) -> None:
    manifest = changed(changes)
    try:
        parse_object(manifest)
        here = ""
    except ManifestError as error:
        here = str(error)
    there = refusal(api_server, namespace, manifest)
    assert bool(here) == bool(there), f"{manifest['spec']}\nhere: {here}\nthere: {there}"
