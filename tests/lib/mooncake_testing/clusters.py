"""Hypothesis strategies of valid clusters, as the manifests that a user would write."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Manifest = dict[str, Any]

_NAMES = st.from_regex(r"\A[a-z]([a-z0-9-]{0,10}[a-z0-9])?\Z").filter(
    lambda name: name not in ("admin", "redis", "scheduler")
)
_SLO = st.one_of(
    st.builds(lambda n: {"target": f"{n}ms"}, st.integers(1, 60_000)),
    st.builds(
        lambda n, p: {"multiplier": f"{n}.5", "percentile": p}, st.integers(1, 20), st.integers(1, 100)
    ),
)


@st.composite
def _pod_template(draw: st.DrawFn, main: str) -> Manifest:
    env = draw(st.lists(st.sampled_from(["HTTP_PROXY", "NCCL_DEBUG", "TZ"]), unique=True))
    spec: Manifest = {"containers": [{"name": main, "env": [{"name": n, "value": "x"} for n in env]}]}
    if draw(st.booleans()):
        spec["containers"][0]["resources"] = {"requests": {"cpu": draw(st.sampled_from(["1", "500m"]))}}
    if draw(st.booleans()):
        spec["nodeSelector"] = {"gpu": "a800"}
    if draw(st.booleans()):
        spec["volumes"] = [{"name": "scratch", "emptyDir": {}}]
        spec["containers"][0]["volumeMounts"] = [{"name": "scratch", "mountPath": "/scratch"}]
    if main == "engine" and draw(st.booleans()):
        spec["containers"].append({"name": "sidecar", "resources": {"requests": {"cpu": "100m"}}})
    return {"metadata": {"labels": {"team": "llm"}}, "spec": spec}


@st.composite
def _engine_pool(draw: st.DrawFn, name: str) -> Manifest:
    pool: Manifest = {"name": name, "replicas": draw(st.integers(1, 4))}
    if draw(st.booleans()):
        tensor, pipeline = draw(st.integers(1, 8)), draw(st.integers(1, 2))
        size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tensor * pipeline % n == 0]))
        pool["instance"] = {"size": size, "parallelism": {"tensor": tensor, "pipeline": pipeline}}
        pool["resources"] = {"gpu": {"count": tensor * pipeline // size}, "sharedMemory": "8Gi"}
    if draw(st.booleans()):
        pool["drain"] = {"timeoutSeconds": draw(st.integers(1, 900))}
    if draw(st.booleans()):
        pool["scheduling"] = {"spreadTopologyKey": "kubernetes.io/hostname"}
    if draw(st.booleans()):
        pool["podTemplate"] = draw(_pod_template("engine"))
    return pool


@st.composite
def _store(draw: st.DrawFn, name: str, *, simulated: bool) -> Manifest:
    pool: Manifest = {"name": name, "replicas": draw(st.integers(1, 3)), "segmentSize": draw(_sizes)}
    if simulated and draw(st.booleans()):
        pool["ssd"] = {"size": draw(_sizes), "path": "/data/kv"}
    if draw(st.booleans()):
        pool["master"] = {"eviction": {"highWatermark": "0.8", "ratio": "0.1"}, "kvLeaseSeconds": 5}
    return pool


_sizes = st.sampled_from(["1Gi", "200Gi", "2Ti", "1.5Gi", "64M"])


@st.composite
def _scheduler(draw: st.DrawFn) -> Manifest:
    scheduler: Manifest = {
        "routing": {
            "policy": draw(st.sampled_from(["kv-centric", "algorithm-1", "round-robin", "llm-d-weighted"]))
        },
        "admission": {"mode": draw(st.sampled_from(["none", "early", "predictive"]))},
    }
    redis: Manifest | None = draw(st.sampled_from([None, {"managed": {}}, {"secretRef": {"name": "redis"}}]))
    if redis is not None:
        if "managed" in redis and draw(st.booleans()):
            redis = {"managed": {"podTemplate": draw(_pod_template("redis"))}}
        scheduler |= {"redis": redis, "replicas": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        scheduler["podTemplate"] = draw(_pod_template("scheduler"))
    if draw(st.booleans()):
        scheduler["auth"] = {"apiKeySecretRef": {"name": "keys"}}
    return scheduler


@st.composite
def _engine(draw: st.DrawFn, *, simulated: bool) -> Manifest:
    engine: Manifest = {
        "type": "Simulated" if simulated else "vLLM",
        "connector": draw(st.sampled_from(["MooncakeConnector", "NixlConnector"])),
        "blockSize": draw(st.sampled_from([16, 128, 512])),
    }
    if simulated:
        engine["simulated"] = {"timeScale": draw(st.integers(1, 50))}
    else:
        engine["image"] = "vllm/vllm-openai:v0.33.0"
    if draw(st.booleans()):
        engine["args"] = ["--max-model-len=131072", "--max-num-seqs", "64"]
    return engine


@st.composite
def cluster_manifests(draw: st.DrawFn) -> Manifest:
    """A valid MooncakeCluster."""
    simulated = draw(st.booleans())
    names = draw(st.lists(_NAMES, min_size=5, max_size=5, unique=True))
    prefill = [draw(_engine_pool(name)) for name in names[: draw(st.integers(1, 2))]]
    decode = [draw(_engine_pool(name)) for name in names[2 : 2 + draw(st.integers(1, 2))]]
    model: Manifest = {"name": "llama3-70b"}
    if draw(st.booleans()):
        claim = {"persistentVolumeClaim": {"claimName": "models"}}
        model |= {"path": "/models/llama", "volume": claim}
    spec: Manifest = {
        "model": model,
        "engine": draw(_engine(simulated=simulated)),
        "slo": {"ttft": draw(_SLO), "tbt": draw(_SLO)},
        "prefillPools": prefill,
        "decodePools": decode,
        "scheduler": draw(_scheduler()),
    }
    if draw(st.booleans()):
        spec["kvCachePools"] = [draw(_store(names[4], simulated=simulated))]
    return {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": draw(_NAMES), "namespace": draw(st.sampled_from(["default", "llm"]))},
        "spec": spec,
    }
