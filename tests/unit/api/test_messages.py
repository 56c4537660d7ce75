"""What the author of a wrong manifest is told: where, what is wrong, what to write."""

import re
from pathlib import Path

import pytest
import yaml

from mooncake_core.api import (
    ManifestError,
    MooncakeCluster,
    MooncakeDecodePool,
    load_manifests,
    parse_manifests,
)

MINIMAL = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: kimi}
spec:
  model: {name: kimi-k2}
  engine: {type: Simulated}
  prefillPools: [{name: prefill}]
  decodePools: [{name: decode}]
"""


def changed(**spec):
    """The minimal manifest with fields of spec replaced; None removes one."""
    document = yaml.safe_load(MINIMAL)
    for field, value in spec.items():
        if value is None:
            del document["spec"][field]
        else:
            document["spec"][field] = value
    return yaml.safe_dump(document)


def complaints(text):
    with pytest.raises(ManifestError) as refused:
        load_manifests(text)
    return [line.removeprefix("manifest: MooncakeCluster/kimi: ") for line in refused.value.problems]


def pools(**fields):
    return changed(decodePools=[{"name": "decode", **fields}])


def test_the_smallest_manifest_gets_sensible_defaults():
    (cluster,) = load_manifests(MINIMAL)
    assert isinstance(cluster, MooncakeCluster)
    assert cluster.spec.prefill_pools[0].replicas == 1
    assert cluster.spec.engine.connector == "MooncakeConnector"
    assert cluster.spec.scheduler.routing.policy == "kv-centric"
    assert cluster.spec.scheduler.admission.mode == "predictive"


def test_a_complaint_names_file_object_field_fault_and_remedy(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text(pools(replicas=0))
    with pytest.raises(ManifestError) as refused:
        load_manifests(file)
    assert refused.value.problems == [
        f"{file}: MooncakeCluster/kimi: spec.decodePools[0].replicas: "
        "must be >= 1 (got 0); write a number of instances, e.g. 2"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (pools(replicas="two"), "spec.decodePools[0].replicas: must be a whole number (got two)"),
        (pools(replica=2), "spec.decodePools[0].replica: unknown field; did you mean replicas?"),
        (pools(name="Decode"), "spec.decodePools[0].name: is not valid (got Decode); write "),
        (pools(name="scheduler"), "spec.decodePools[0].name: scheduler is taken by the cluster"),
        (pools(name="d" * 36), f"spec.decodePools[0].name: kimi-{'d' * 36} has more than 40 characters"),
        (
            pools(resources={"gpu": {"count": 8}}, instance={"parallelism": {"tensor": 4}}),
            "spec.decodePools[0].instance: instance.size × resources.gpu.count must equal",
        ),
        (
            pools(instance={"size": 2}),
            "spec.decodePools[0].instance.size: the Pods must share tensor × pipeline × data of parallelism"
            " evenly; write e.g. size 2 with pipeline 2",
        ),
        (
            pools(instance={"size": 2, "parallelism": {"tensor": 8}}, resources={"gpu": {"count": 8}}),
            "spec.decodePools[0].instance: instance.size × resources.gpu.count must equal",
        ),
        (
            pools(resources={"memory": 64}),
            "spec.decodePools[0].resources.memory: must be text (got 64: put it",
        ),
        (
            pools(resources={"memory": "64GB"}),
            "spec.decodePools[0].resources.memory: is not valid (got 64GB)",
        ),
        (
            pools(drain={"timeoutSeconds": 0}),
            "spec.decodePools[0].drain.timeoutSeconds: must be >= 1 (got 0)",
        ),
        (
            changed(slo={"ttft": {"target": "2s", "multiplier": "10"}}),
            "spec.slo.ttft: needs either target or multiplier",
        ),
        (
            changed(slo={"tbt": {"target": "fast"}}),
            "spec.slo.tbt.target: is not valid (got fast); write seconds",
        ),
        (changed(slo={"tbt": {"target": "0ms"}}), "spec.slo.tbt.target: must be more than 0"),
        (changed(slo={"tbt": {"multiplier": "1"}}), "spec.slo.tbt.multiplier: must be more than 1"),
        (changed(model=None), "spec.model: is required"),
        (changed(model={"name": "m", "path": "models/m"}), "spec.model.path: is not valid (got models/m)"),
        (
            changed(engine={"type": "simulated"}),
            "spec.engine.type: must be vLLM, SGLang or Simulated (got simulated); did you mean Simulated?",
        ),
        (changed(engine={"type": "vLLM"}), "spec.engine.image: is required for vLLM"),
        (
            changed(engine={"type": "Simulated", "simulated": {"profile": "h100"}}),
            "spec.engine.simulated.profile: is not a known profile; write one of llama3-70b-8xa800",
        ),
        (
            changed(engine={"type": "vLLM", "image": "i", "simulated": {}}),
            "spec.engine.simulated: only simulated engines have it",
        ),
        (
            changed(engine={"type": "Simulated", "args": ["--max-num-seqs=4", "--block_size=16"]}),
            "spec.engine.args[1]: --block-size is set by Mooncake; set engine.blockSize",
        ),
        (
            changed(engine={"type": "Simulated", "args": ["--master_addr=10.0.0.1"]}),
            "spec.engine.args[0]: --master-addr is set by Mooncake; leave it out",
        ),
        (
            changed(engine={"type": "Simulated", "args": ["-n", "2"]}),
            "spec.engine.args[0]: --nnodes is set by Mooncake; set instance.size",
        ),
        (
            changed(engine={"type": "Simulated", "args": ["-tp", "8"]}),
            "spec.engine.args[0]: --tensor-parallel-size is set by Mooncake; set instance.parallelism",
        ),
        (
            changed(scheduler={"replicas": 2}),
            "spec.scheduler.replicas: several schedulers need to share a Redis; write redis: {managed: {}}",
        ),
        (
            changed(scheduler={"redis": {"managed": {}, "secretRef": {"name": "r"}}}),
            "spec.scheduler.redis: needs either managed or secretRef",
        ),
        (
            changed(scheduler={"routing": {"policy": "kvcentric"}}),
            "spec.scheduler.routing.policy: must be kv-centric, algorithm-1",
        ),
        (
            changed(scheduler={"routing": {"disaggregationThresholdTokens": -1}}),
            "spec.scheduler.routing.disaggregationThresholdTokens: ",
        ),
        (
            changed(coordination={"ratio": {"minPrefillPerDecode": "2", "maxPrefillPerDecode": "0.5"}}),
            "spec.coordination.ratio.minPrefillPerDecode: must be <= maxPrefillPerDecode",
        ),
        (
            changed(coordination={"ratio": {"minPrefillPerDecode": "2"}}),
            "spec.coordination.ratio: the replicas of prefillPools and decodePools do not keep it",
        ),
        (
            changed(kvCachePools=[{"name": "decode", "segmentSize": "1Gi"}]),
            "spec.kvCachePools[0].name: decode is also the name of decodePools[0]",
        ),
        (
            changed(
                kvCachePools=[{"name": "kv", "segmentSize": "2Gi", "resources": {"memory": "1Gi"}}],
            ),
            "spec.kvCachePools[0].segmentSize: must fit into resources.memory",
        ),
        (
            changed(kvCachePools=[{"name": "kv", "segmentSize": "0"}]),
            "spec.kvCachePools[0].segmentSize: must be more than 0",
        ),
    ],
)
def test_wrong_fields_are_named_with_their_remedy(text, expected):
    assert any(line.startswith(expected) for line in complaints(text)), complaints(text)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (changed(engine={"type": "SGLang", "image": "i"}), "spec.engine.type"),
        (changed(network={"protocol": "RDMA"}), "spec.network.protocol"),
        (changed(network={"gid": {"index": "auto"}}), "spec.network.gid"),
        (changed(network={"gid": {"index": 3}}), "spec.network.gid"),
        (changed(network={"mtu": {"path": 4096}}), "spec.network.mtu"),
        (pools(hugepages={"size": "2Mi"}), "spec.decodePools[0].hugepages"),
        (pools(autoscaling={"mode": "SLO"}), "spec.decodePools[0].autoscaling.mode"),
        (pools(autoscaling={"maxReplicas": 3}), "spec.decodePools[0].autoscaling.maxReplicas"),
        (pools(instance={"parallelism": {"data": 2}}), "spec.decodePools[0].instance.parallelism.data"),
        (
            changed(coordination={"roleConversion": {"mode": "Restart"}}),
            "spec.coordination.roleConversion.mode",
        ),
        (
            changed(kvCachePools=[{"name": "kv", "segmentSize": "1Gi", "master": {"replicas": 3}}]),
            "spec.kvCachePools[0].master.replicas",
        ),
    ],
)
def test_what_does_not_work_yet_is_refused_and_says_so(text, field):
    assert any(line.startswith(f"{field}: ") and "not yet supported" in line for line in complaints(text))


def test_values_that_ask_for_nothing_new_are_no_reason_to_refuse():
    text = changed(
        network={"protocol": "TCP", "mode": "None", "fallback": "Fail"},
        coordination={"roleConversion": {"mode": "Disabled"}, "rollout": {"pairing": "SameRevision"}},
        decodePools=[{"name": "decode", "autoscaling": {"mode": "None"}, "drain": {"onTimeout": "Force"}}],
    )
    assert load_manifests(text)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork: must not be set; not yet supported"),
        (
            {"spec": {"terminationGracePeriodSeconds": 5}},
            "spec.terminationGracePeriodSeconds: must not be set; write drain.timeoutSeconds",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "PYTHONHASHSEED", "value": "7"}]}]}},
            "spec.containers[0].env[0].name: PYTHONHASHSEED is set by Mooncake; remove it",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}},
            "spec.containers[0].command: must not be set",
        ),
        (
            {"spec": {"containers": [{"name": "sidecar", "image": "x"}]}},
            "spec.containers[0].image: must not be set; sidecar is Mooncake's own container",
        ),
        (
            {"spec": {"initContainers": [{"name": "sidecar", "image": "x"}]}},
            "spec.initContainers[0].name: sidecar is Mooncake's own",
        ),
        (
            {"spec": {"initContainers": [{"name": "engine", "image": "x"}]}},
            "spec.initContainers[0].name: engine is Mooncake's own container; write it below containers",
        ),
        (
            {"spec": {"containers": [{"name": "enginne", "env": []}]}},
            "spec.containers[0].image: is required: Mooncake has no enginne here; write an image, or",
        ),
        ({"spec": {"containers": {"name": "engine"}}}, "spec.containers: must be a list of containers"),
        ({"spec": {"volumes": [{"name": "run", "emptyDir": {}}]}}, "spec.volumes[0].name: run is Mooncake's"),
        # Nothing can be merged by a name that is none.
        ({"spec": {"volumes": [{"name": {}}]}}, "spec.volumes: must be a list of volumes"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes: must be a list of volumes"),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": ["X"], "value": "y"}]}]}},
            "spec.containers[0].env: must be a list of variables",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": {"x": 1}}]}]}},
            "spec.containers[0].volumeMounts: must be a list of mounts",
        ),
        (
            {
                "spec": {
                    "containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/run/mooncake/x"}]}]
                }
            },
            "spec.containers[0].volumeMounts[0].mountPath: /run/mooncake/x is Mooncake's own",
        ),
        ({"metadata": {"labels": {"mooncake.io/pool": "x"}}}, "metadata.labels: mooncake.io/pool belongs to"),
    ],
)
def test_a_pod_template_that_contradicts_what_is_rendered_is_refused(template, expected):
    found = complaints(pools(podTemplate=template))
    assert any(line.startswith(f"spec.decodePools[0].podTemplate.{expected}") for line in found), found


_OF_ANY_CONTAINER = ("args", "command", "image", "lifecycle", "ports")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_OF_ANY_POD = ("hostNetwork", "hostname", "restartPolicy", "subdomain", "terminationGracePeriodSeconds")


def of_scheduler(template):
    return changed(scheduler={"podTemplate": template}), "spec.scheduler.podTemplate"


def of_redis(template):
    scheduler = {"redis": {"managed": {"podTemplate": template}}}
    return changed(scheduler=scheduler), "spec.scheduler.redis.managed.podTemplate"


def of_engines(template):
    return pools(podTemplate=template), "spec.decodePools[0].podTemplate"


def of_store(template):
    store = {"name": "kv", "segmentSize": "1Gi", "podTemplate": template}
    return changed(kvCachePools=[store]), "spec.kvCachePools[0].podTemplate"


@pytest.mark.parametrize(
    ("place", "main"),
    [(of_scheduler, "scheduler"), (of_redis, "redis"), (of_engines, "engine"), (of_store, "node")],
)
def test_what_is_rendered_is_refused_in_every_template_with_its_place_and_a_remedy(place, main):
    whole = {field: {} for field in (*_OF_ANY_CONTAINER, *_PROBES)}
    whole |= {
        "env": [{"name": "MOONCAKE_POD_IP", "value": "x"}],
        "volumeMounts": [{"name": "x", "mountPath": "/etc/mooncake/x"}],
    }
    spec = {field: "x" for field in _OF_ANY_POD} | {
        "containers": [{"name": main, **whole}, {"name": "other", "resources": {}}],
        "volumes": [{"name": "redis", "emptyDir": {}}],
    }
    text, path = place({"spec": spec})
    found = complaints(text)
    wanted = {f"{path}.spec.{field}" for field in _OF_ANY_POD}
    wanted |= {f"{path}.spec.containers[0].{field}" for field in (*_OF_ANY_CONTAINER, *_PROBES)}
    wanted |= {
        f"{path}.spec.containers[0].env[0].name",
        f"{path}.spec.containers[0].volumeMounts[0].mountPath",
        f"{path}.spec.containers[1].image",
        f"{path}.spec.volumes[0].name",
    }
    assert {line.split(": ")[0] for line in found} == wanted
    remedies = ("leave it out", "write", "remove it", "choose another name", "mount it elsewhere")
    assert all(any(remedy in line for remedy in remedies) for line in found)


@pytest.mark.parametrize(
    ("place", "container", "expected"),
    [
        (of_scheduler, {"name": "scheduler", "image": "x"}, "by the chart's value images.mooncake"),
        (of_redis, {"name": "redis", "image": "x"}, "by the chart's value images.redis"),
        (of_redis, {"name": "redis", "args": []}, "name it in scheduler.redis.secretRef"),
        (of_store, {"name": "node", "image": "x"}, "write image of the KV cache pool"),
        # What belongs to another kind of Pod would be a container without an image.
        (of_scheduler, {"name": "engine"}, "has no engine here; write an image, or the name scheduler"),
        (of_engines, {"name": "scheduler", "resources": {}}, "or the name engine"),
        (of_store, {"name": "engine", "env": []}, "or the name node"),
        (of_scheduler, {"name": "sidecar", "resources": {}}, "choose another name"),
        (of_store, {"name": "sidecar", "resources": {}}, "choose another name"),
    ],
)
def test_the_remedy_is_that_of_the_kind_of_pods(place, container, expected):
    text, path = place({"spec": {"containers": [container]}})
    (found,) = complaints(text)
    assert found.startswith(f"{path}.spec.containers[0].")
    assert found.endswith(expected)


def test_what_is_a_users_own_in_templates_is_taken():
    own = {"name": "logs", "image": "fluent-bit", "command": ["fluent-bit"], "env": [{"name": "MOONCAKE_X"}]}
    rest = {"nodeSelector": {"cpu": "yes"}, "priorityClassName": "serving", "tolerations": [{"key": "cpu"}]}
    for place, main in ((of_scheduler, "scheduler"), (of_redis, "redis"), (of_engines, "sidecar")):
        asks = {"name": main, "resources": {"limits": {"memory": "1Gi"}}}
        text, _ = place(
            {"metadata": {"labels": {"team": "llm"}}, "spec": {**rest, "containers": [asks, own]}}
        )
        assert load_manifests(text)
    # Engines' variables mean nothing to a scheduler.
    hashes = {"name": "scheduler", "env": [{"name": "PYTHONHASHSEED", "value": "7"}]}
    assert load_manifests(of_scheduler({"spec": {"containers": [hashes]}})[0])


def test_every_problem_of_every_document_is_listed():
    text = pools(replicas=0, name="X") + "---\n" + MINIMAL.replace("MooncakeCluster", "MooncakeClutser")
    with pytest.raises(ManifestError) as refused:
        load_manifests(text)
    assert len(refused.value.problems) == 3
    assert "kind: MooncakeClutser is not known; did you mean MooncakeCluster?" in refused.value.problems[2]


def test_a_wrong_version_is_refused_with_the_right_one():
    assert complaints(MINIMAL.replace("v1alpha1", "v1")) == [
        "apiVersion: must be mooncake.io/v1alpha1 (got mooncake.io/v1)"
    ]


def test_broken_yaml_is_located(tmp_path: Path):
    file = tmp_path / "broken.yaml"
    file.write_text("a: [1,\nb: }")
    with pytest.raises(ManifestError, match=r"broken.yaml:2:\d+: not YAML"):
        load_manifests(file)


def test_a_key_that_comes_twice_is_refused_where_yaml_would_keep_the_last():
    with pytest.raises(ManifestError, match="the key replicas comes twice"):
        load_manifests(MINIMAL.replace("{name: decode}", "{name: decode, replicas: 1, replicas: 2}"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("!!int abc", "abc is no int"),
        ("!!float abc", "abc is no float"),
        ("!!bool perhaps", "perhaps is no bool"),
        ("!!timestamp 2026-99-99", "2026-99-99 is no timestamp"),
        ("!!timestamp soon", "soon is no timestamp"),
        ("9" * 5_000, "9" * 40 + " is no int"),
        ("!!python/object:os.system a", "could not determine a constructor"),
    ],
)
def test_a_value_that_its_tag_does_not_fit_is_located(value: str, said: str):
    text = MINIMAL.replace("{name: decode}", f"{{name: decode, replicas: {value}}}")
    with pytest.raises(ManifestError, match=rf"^manifest:\d+:\d+: not YAML: {re.escape(said)}"):
        load_manifests(text)


@pytest.mark.parametrize("text", ["[" * 20_000, "\n".join(" " * depth + "a:" for depth in range(3_000))])
def test_what_is_nested_without_end_is_refused(text: str):
    with pytest.raises(ManifestError, match="nested too deeply"):
        parse_manifests(text)


def test_a_text_is_never_taken_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.yaml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    for text in ("", "a.yaml"):
        with pytest.raises(ManifestError, match=r"^typed: "):
            parse_manifests(text, file="typed")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("data: {password: 123456}", "data.password: must be text; write it in quotes"),
        ("data: {a: é}", "data.a: is not base64; stringData takes plain text"),
        ("data: [a]", "data: must be a mapping of keys to texts"),
        ("stringData: hello", "stringData: must be a mapping of keys to texts"),
        ("2: b", "2: unknown field; remove it"),
    ],
)
def test_a_secret_that_the_api_server_refuses_is_refused_without_telling_it(fields: str, said: str):
    text = f"apiVersion: v1\nkind: Secret\nmetadata: {{name: keys}}\n{fields}\n"
    with pytest.raises(ManifestError, match=f"Secret/keys: {re.escape(said)}") as refused:
        parse_manifests(text)
    assert "123456" not in str(refused.value)
    assert parse_manifests(text.replace(fields, "data: {a: 'YWJj\n\n  ZGVm'}"))


@pytest.mark.parametrize("metadata", ["{name: [a]}", "{name: 5}", "{name: a, namespace: {}}", "{}", "a"])
def test_an_object_without_a_proper_name_is_refused(metadata: str):
    with pytest.raises(ManifestError, match=r"metadata\.name"):
        parse_manifests(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {metadata}\n")


def test_an_object_whose_namespace_is_null_lies_in_the_default_one():
    text = "apiVersion: v1\nkind: Secret\nmetadata: {name: a, namespace: }\n"
    assert len(parse_manifests(text)) == 1
    with pytest.raises(ManifestError, match="Secret a is there twice in namespace default"):
        parse_manifests(f"{text}---\n{text.replace('namespace: ', 'namespace: default')}")


def test_a_secret_of_no_version_is_told_which_one_there_is():
    with pytest.raises(ManifestError, match=r"Secret/a: apiVersion: must be v1 \(got nothing\)"):
        parse_manifests("kind: Secret\nmetadata: {name: a}\n")


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path):
    with pytest.raises(ManifestError, match="No such file"):
        load_manifests(tmp_path / "nowhere.yaml")
    with pytest.raises(ManifestError, match="File name too long"):
        load_manifests(tmp_path / ("n" * 300))
    with pytest.raises(ManifestError, match=r"nowhere.yaml: no such file"):
        load_manifests("nowhere.yaml")


def test_a_document_that_is_no_mapping_is_refused():
    with pytest.raises(ManifestError, match="document 1: must be a mapping"):
        load_manifests("- a\n- b\n")


def test_what_is_too_large_for_any_api_server_is_not_read_to_its_end(tmp_path: Path):
    file = tmp_path / "large.yaml"
    file.write_text("# nothing\n" * 500_000)
    for endless in (file, Path("/dev/zero")):
        with pytest.raises(ManifestError, match=f"^{endless}: more than 4,000,000 characters"):
            load_manifests(endless)


def test_an_empty_file_is_refused(tmp_path: Path):
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    with pytest.raises(ManifestError, match="no documents"):
        load_manifests(file)


def test_secrets_and_config_maps_pass_through_and_pools_are_models():
    text = (
        MINIMAL
        + """
---
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {keys.json: '{"me": "k"}'}
---
apiVersion: mooncake.io/v1alpha1
kind: MooncakeDecodePool
metadata: {name: kimi-more}
spec: {clusterRef: {name: kimi}, replicas: 2}
"""
    )
    cluster, secret, pool = load_manifests(text)
    assert isinstance(cluster, MooncakeCluster)
    assert isinstance(secret, dict)
    assert secret["stringData"] == {"keys.json": '{"me": "k"}'}
    assert isinstance(pool, MooncakeDecodePool)
    assert pool.spec.replicas == 2


def test_a_pool_object_must_not_take_the_name_of_an_inline_pool():
    pool = "\n---\napiVersion: mooncake.io/v1alpha1\nkind: MooncakeDecodePool\n"
    pool += "metadata: {name: kimi-decode}\nspec: {clusterRef: {name: kimi}}\n"
    with pytest.raises(ManifestError, match="pool kimi-decode is there twice"):
        load_manifests(MINIMAL + pool)


def test_a_folder_is_read_file_by_file(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(MINIMAL)
    (tmp_path / "b.yml").write_text(MINIMAL.replace("kimi}", "other}"))
    (tmp_path / "notes.txt").write_text("not YAML: [")
    assert [item.metadata.name for item in load_manifests(tmp_path)] == ["kimi", "other"]


def test_time_stamps_written_by_the_api_server_are_accepted():
    text = MINIMAL.replace("{name: kimi}", "{name: kimi, creationTimestamp: 2026-01-02T03:04:05Z, uid: u}")
    (cluster,) = load_manifests(text)
    assert cluster.metadata.creation_timestamp == "2026-01-02T03:04:05Z"


def test_the_quickstart_is_valid():
    (cluster,) = load_manifests(Path(__file__).parents[3] / "examples" / "quickstart.yaml")
    assert cluster.metadata.name == "quickstart"
