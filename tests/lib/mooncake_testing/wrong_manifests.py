"""Manifests that the command line and the API server must refuse, with the same field and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wrong:
    """One wrong manifest."""

    name: str
    manifest: dict[str, Any]
    field: str
    """Path of the field to blame."""
    words: str
    """What both sides say about it."""
    server_words: str | None = None
    """What the API server says instead, where the words are its own."""
    by_server: bool = True
    """Whether it can be refused there: what hides in a podTemplate only the operator can see."""


def cluster(**spec: Any) -> dict[str, Any]:
    """A small valid cluster with fields of its spec replaced; None removes one."""
    whole = {
        "model": {"name": "kimi-k2"},
        "engine": {"type": "Simulated"},
        "prefillPools": [{"name": "prefill"}],
        "decodePools": [{"name": "decode"}],
        **spec,
    }
    return {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": "kimi"},
        "spec": {name: value for name, value in whole.items() if value is not None},
    }


def decode(**fields: Any) -> dict[str, Any]:
    """A cluster whose decode pool has these fields."""
    return cluster(decodePools=[{"name": "decode", **fields}])


def store(**fields: Any) -> dict[str, Any]:
    """A cluster whose store has these fields."""
    return cluster(kvCachePools=[{"name": "kv", "segmentSize": "1Gi", **fields}])


def pool(kind: str = "MooncakeDecodePool", **spec: Any) -> dict[str, Any]:
    """A pool on its own."""
    return {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "kimi-more"},
        "spec": {"clusterRef": {"name": "kimi"}, **spec},
    }


def _named(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return {**manifest, "metadata": {"name": name}}


def wrong_manifests() -> Iterator[Wrong]:
    """All of them."""
    yield from _values()
    yield from _rules()
    yield from _not_yet()
    yield from _templates()


def _values() -> Iterator[Wrong]:
    decode_0 = "spec.decodePools[0]"
    least = "greater than or equal to"
    yield Wrong("no model", cluster(model=None), "spec.model", "is required", "Required value")
    yield Wrong(
        "no replicas", decode(replicas=0), f"{decode_0}.replicas", "write a number of instances", f"{least} 1"
    )
    yield Wrong(
        "replicas in words", decode(replicas="two"), f"{decode_0}.replicas", "whole number", "must be of type"
    )
    yield Wrong(
        "a misspelt field",
        decode(replica=2),
        f"{decode_0}.replica",
        "did you mean replicas?",
        "unknown field",
    )
    yield Wrong("a name in capitals", decode(name="Decode"), f"{decode_0}.name", "write a name of its own")
    yield Wrong(
        "the cluster's name", _named(cluster(), "Kimi"), "metadata.name", "small letters, digits and '-'"
    )
    memory = decode(resources={"memory": "64GB"})
    yield Wrong(
        "decimal gigabytes", memory, f"{decode_0}.resources.memory", 'write a quantity as text, e.g. "64Gi"'
    )
    shm = decode(resources={"sharedMemory": "much"})
    yield Wrong(
        "shared memory", shm, f"{decode_0}.resources.sharedMemory", 'write a quantity as text, e.g. "64Gi"'
    )
    no_drain = decode(drain={"timeoutSeconds": 0})
    yield Wrong("no drain", no_drain, f"{decode_0}.drain.timeoutSeconds", "write whole seconds", f"{least} 1")
    fast = cluster(slo={"tbt": {"target": "fast"}})
    yield Wrong(
        "an SLO in words", fast, "spec.slo.tbt.target", "write seconds or milliseconds, e.g. 2s or 100ms"
    )
    relative = cluster(model={"name": "m", "path": "models/m"})
    yield Wrong("a relative path", relative, "spec.model.path", "write an absolute path")
    engine = cluster(engine={"type": "simulated"})
    yield Wrong("an engine's case", engine, "spec.engine.type", "did you mean Simulated?", '"Simulated"')
    policy = cluster(scheduler={"routing": {"policy": "kvcentric"}})
    yield Wrong("a policy", policy, "spec.scheduler.routing.policy", "must be kv-centric", '"kv-centric"')
    skew = cluster(coordination={"rollout": {"maxSkew": "0.25"}})
    yield Wrong("a skew", skew, "spec.coordination.rollout.maxSkew", "write a percentage, e.g. 25%")
    ratio = cluster(coordination={"ratio": {"minPrefillPerDecode": "half"}})
    field = "spec.coordination.ratio.minPrefillPerDecode"
    yield Wrong("a ratio", ratio, field, 'write a decimal number as text, e.g. "0.25"')
    many = cluster(prefillPools=[{"name": f"p{n}"} for n in range(17)])
    yield Wrong("too many pools", many, "spec.prefillPools", "at most 16 items", "must have at most 16 items")
    alone = pool()
    del alone["spec"]["clusterRef"]
    yield Wrong("no cluster", alone, "spec.clusterRef", "is required", "Required value")
    yield Wrong(
        "a pool's replicas",
        pool(replicas=1001),
        "spec.replicas",
        "must be <= 1000",
        "less than or equal to 1000",
    )


def _rules() -> Iterator[Wrong]:
    decode_0 = "spec.decodePools[0]"
    gpus = decode(resources={"gpu": {"count": 8}}, instance={"parallelism": {"tensor": 4}})
    yield Wrong(
        "GPUs", gpus, f"{decode_0}.instance", "must equal tensor × pipeline × data of instance.parallelism"
    )
    halves = decode(instance={"size": 2, "parallelism": {"tensor": 3}})
    yield Wrong("Pods that share unevenly", halves, f"{decode_0}.instance.size", "write e.g. size 2 with")
    pods = decode(
        resources={"gpu": {"count": 8}}, instance={"size": 2, "parallelism": {"tensor": 4, "pipeline": 2}}
    )
    yield Wrong("GPUs of several Pods", pods, f"{decode_0}.instance", "instance.size × resources.gpu.count")
    stuck = decode(update={"maxSurge": 0, "maxUnavailable": 0})
    yield Wrong("no way to update", stuck, f"{decode_0}.update", "write maxSurge: 1, or maxUnavailable: 1")
    both = cluster(slo={"ttft": {"target": "2s", "multiplier": "10"}})
    yield Wrong("two targets", both, "spec.slo.ttft", "needs either target or multiplier")
    zero = cluster(slo={"tbt": {"target": "0ms"}})
    yield Wrong(
        "a target of nothing", zero, "spec.slo.tbt.target", "must be more than 0; write e.g. 2s or 100ms"
    )
    low = cluster(slo={"tbt": {"multiplier": "1"}})
    yield Wrong("a multiplier of one", low, "spec.slo.tbt.multiplier", 'must be more than 1; write e.g. "10"')
    yield Wrong("no image", cluster(engine={"type": "vLLM"}), "spec.engine.image", "is required for vLLM")
    plain = cluster(engine={"type": "vLLM", "image": "i", "simulated": {}})
    yield Wrong("a profile of vLLM", plain, "spec.engine.simulated", "only simulated engines have it")
    shared = cluster(scheduler={"replicas": 2})
    yield Wrong(
        "schedulers apart", shared, "spec.scheduler.replicas", "write redis: {managed: {}}, or replicas: 1"
    )
    two = cluster(scheduler={"redis": {"managed": {}, "secretRef": {"name": "r"}}})
    yield Wrong("two Redis", two, "spec.scheduler.redis", "needs either managed or secretRef")
    threshold = cluster(scheduler={"routing": {"balancingThreshold": "0.5"}})
    field = "spec.scheduler.routing.balancingThreshold"
    yield Wrong("a threshold", threshold, field, "must be at least 1")
    turned = cluster(coordination={"ratio": {"minPrefillPerDecode": "2", "maxPrefillPerDecode": "0.5"}})
    field = "spec.coordination.ratio.minPrefillPerDecode"
    yield Wrong("a ratio turned round", turned, field, "must be <= maxPrefillPerDecode; exchange the two")
    broken = cluster(coordination={"ratio": {"minPrefillPerDecode": "2"}})
    yield Wrong("a ratio not kept", broken, "spec.coordination.ratio", "change replicas or the bounds")
    small = decode(replicas=4, resources={"gpu": {"count": 8}}, instance={"parallelism": {"tensor": 8}})
    small["spec"]["coordination"] = {"gpuBudget": 8}
    yield Wrong(
        "a GPU budget", small, "spec.coordination.gpuBudget", "write a larger budget or fewer replicas"
    )
    fits = store(segmentSize="2Gi", resources={"memory": "1Gi"})
    yield Wrong("a segment", fits, "spec.kvCachePools[0].segmentSize", "must fit into resources.memory")
    empty = store(segmentSize="0")
    yield Wrong(
        "a segment of nothing",
        empty,
        "spec.kvCachePools[0].segmentSize",
        'must be more than 0; write e.g. "200Gi"',
    )
    gpu_store = store(resources={"gpu": {"count": 1}})
    yield Wrong(
        "GPUs of a store", gpu_store, "spec.kvCachePools[0].resources.gpu", "a store needs no GPU; remove it"
    )
    mark = store(master={"eviction": {"highWatermark": "1.5"}})
    field = "spec.kvCachePools[0].master.eviction.highWatermark"
    yield Wrong("a watermark", mark, field, 'must be above 0 and at most 1; write e.g. "0.90"')
    twice = cluster(prefillPools=[{"name": "decode"}])
    yield Wrong("a name twice", twice, "spec", "give each pool its own", "names must be unique over")
    reserved = decode(name="scheduler")
    yield Wrong("a reserved name", reserved, "spec.decodePools", "choose another name")
    masters = store()
    masters["spec"]["decodePools"] = [{"name": "kv-master"}]
    yield Wrong("a store's masters' name", masters, "spec.decodePools", "choose another name")
    long = decode(name="d" * 36)
    yield Wrong("long names together", long, "spec.decodePools", "shorten one of the two")
    group = cluster(engine={"type": "Simulated", "args": ["--nnodes", "2"]})
    yield Wrong(
        "an argument of groups",
        group,
        "spec.engine.args",
        "--nnodes is set by Mooncake",
        "an argument is set by Mooncake itself",
    )
    argument = cluster(engine={"type": "Simulated", "args": ["--max-num-seqs=4", "--block_size=16"]})
    yield Wrong("an argument of ours", argument, "spec.engine.args", "is set by Mooncake")
    short = cluster(engine={"type": "Simulated", "args": ["-tp", "8"]})
    yield Wrong("its short form", short, "spec.engine.args", "is set by Mooncake")


def _not_yet() -> Iterator[Wrong]:
    decode_0, words = "spec.decodePools[0]", "not yet supported"
    sglang = cluster(engine={"type": "SGLang", "image": "i"})
    yield Wrong("SGLang", sglang, "spec.engine.type", words)
    for name, network in {
        "protocol": {"protocol": "RDMA"},
        "fallback": {"fallback": "TCP"},
        "mode": {"mode": "DRA"},
        "resources": {"resources": [{"name": "rdma/a"}]},
        "gid": {"gid": {"index": 3}},
        "mtu": {"mtu": {"path": 4096}},
    }.items():
        yield Wrong(f"network {name}", cluster(network=network), f"spec.network.{name}", words)
    yield Wrong("hugepages", decode(hugepages={"size": "2Mi"}), f"{decode_0}.hugepages", words)
    yield Wrong(
        "hugepages of a store", store(hugepages={"size": "2Mi"}), "spec.kvCachePools[0].hugepages", words
    )
    for mode in ("SLO", "External"):
        scaled = decode(autoscaling={"mode": mode})
        yield Wrong(f"autoscaling {mode}", scaled, f"{decode_0}.autoscaling.mode", words)
    bound = decode(autoscaling={"maxReplicas": 3})
    yield Wrong("a bound of autoscaling", bound, f"{decode_0}.autoscaling.maxReplicas", words)
    data = decode(instance={"parallelism": {"data": 2}})
    yield Wrong("data parallelism", data, f"{decode_0}.instance.parallelism.data", words)
    for mode in ("Restart", "Runtime"):
        conversion = cluster(coordination={"roleConversion": {"mode": mode}})
        yield Wrong(f"conversion {mode}", conversion, "spec.coordination.roleConversion.mode", words)
    yield Wrong("masters", store(master={"replicas": 3}), "spec.kvCachePools[0].master.replicas", words)
    two = [{"name": name, "segmentSize": "1Gi"} for name in ("a", "b")]
    yield Wrong("two stores", cluster(kvCachePools=two), "spec.kvCachePools", words)


def _templates() -> Iterator[Wrong]:
    template = "spec.decodePools[0].podTemplate"
    label = decode(podTemplate={"metadata": {"labels": {"mooncake.io/pool": "x"}}})
    words = "use a label of your own domain"
    yield Wrong("a label of ours", label, f"{template}.metadata.labels", words, "use your own domain")
    for place, of in (
        ("spec.scheduler.podTemplate", lambda t: {"podTemplate": t}),
        ("spec.scheduler.redis.managed.podTemplate", lambda t: {"redis": {"managed": {"podTemplate": t}}}),
    ):
        label = cluster(scheduler=of({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}))
        yield Wrong(
            f"a label of ours, {place}", label, f"{place}.metadata.labels", words, "use your own domain"
        )
        graceful = cluster(scheduler=of({"spec": {"terminationGracePeriodSeconds": 5}}))
        field = f"{place}.spec.terminationGracePeriodSeconds"
        yield Wrong(f"grace, {place}", graceful, field, "must not be set; leave it out", by_server=False)
    network = decode(podTemplate={"spec": {"hostNetwork": True}})
    yield Wrong("host network", network, f"{template}.spec.hostNetwork", "leave it out", by_server=False)
    variable = {"name": "PYTHONHASHSEED", "value": "7"}
    seed = decode(podTemplate={"spec": {"containers": [{"name": "engine", "env": [variable]}]}})
    field = f"{template}.spec.containers[0].env[0].name"
    yield Wrong("a variable of ours", seed, field, "is set by Mooncake; remove it", by_server=False)
