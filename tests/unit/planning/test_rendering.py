"""What a cluster becomes: command lines, addresses, documents."""

import json

import msgspec
import pytest

from mooncake_core.api import MooncakeDecodePool, parse_object
from mooncake_core.config import AdmissionMode, SchedulerConfig, SidecarConfig
from mooncake_core.registry import Instance, Role
from mooncake_operator.planning import ClusterNames, Credentials, Images, LocalNames, pod_names, render

SECRETS = Credentials(redis_password="s3cret")


def cluster(*, metadata=None, **spec):
    base = {
        "model": {"name": "llama3-70b"},
        "engine": {"type": "Simulated", "blockSize": 512, "simulated": {"timeScale": 10}},
        "slo": {"ttft": {"target": "30s"}, "tbt": {"percentile": 99, "target": "100ms"}},
        "prefillPools": [{"name": "prefill", "replicas": 2}],
        "decodePools": [{"name": "decode", "replicas": 2, "drain": {"timeoutSeconds": 60}}],
        "kvCachePools": [{"name": "kv", "segmentSize": "1Gi", "replicas": 2}],
        "scheduler": {"routing": {"policy": "algorithm-1"}, "admission": {"mode": "none"}},
    }
    document = {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": "q", **(metadata or {})},
        "spec": {**base, **spec},
    }
    return parse_object(document)


SHARED = {"replicas": 2, "redis": {"managed": {}}}
SIMULATED = {"type": "Simulated"}
VLLM = {"type": "vLLM", "image": "vllm/vllm-openai:v0.33.0"}


def local(a_cluster, pools=()):
    bases = {pod: 20_000 + 10 * number for number, pod in enumerate(pod_names(a_cluster, pools))}
    return LocalNames(bases, serving=8000)


def by_name(objects, name):
    (found,) = [item for item in objects if item["metadata"]["name"] == name]
    return found


def container(pod, name):
    (found,) = [item for item in pod["spec"]["containers"] if item["name"] == name]
    return found


def env_of(a_container):
    return {item["name"]: item.get("value") for item in a_container["env"]}


def flag(arguments, name):
    return arguments[arguments.index(name) + 1]


def document(world, config_map, key):
    return json.loads(by_name(world.config_maps, config_map)["data"][key])


def test_pods_are_called_after_pool_and_role():
    assert pod_names(cluster()) == [
        *("q-prefill-p-0", "q-prefill-p-1", "q-decode-d-0", "q-decode-d-1"),
        *("q-kv-master-0", "q-kv-kv-0", "q-kv-kv-1", "q-scheduler-0"),
    ]


def test_all_pods_of_the_world_are_foretold_by_name():
    a_cluster = cluster(scheduler=SHARED)
    world = render(a_cluster, local(a_cluster), credentials=SECRETS)
    rendered = [pod["metadata"]["name"] for pod in (*world.pods, *world.scheduler_pods)]
    assert sorted(rendered) == sorted(pod_names(a_cluster))


def test_inline_entries_become_pool_objects_with_the_declared_number():
    pools = render(cluster(), ClusterNames()).pools
    assert [(pool["kind"], pool["metadata"]["name"]) for pool in pools] == [
        ("MooncakePrefillPool", "q-prefill"),
        ("MooncakeDecodePool", "q-decode"),
        ("MooncakeKVCachePool", "q-kv"),
    ]
    assert pools[0]["spec"]["clusterRef"] == {"name": "q"}
    assert pools[0]["spec"]["declaredReplicas"] == pools[0]["spec"]["replicas"] == 2
    assert all(parse_object(pool).manifest() == pool for pool in pools)


def test_without_redis_the_scheduler_reads_its_instances_from_a_file():
    a_cluster = cluster()
    world = render(a_cluster, local(a_cluster))
    config = SchedulerConfig.model_validate(document(world, "q-scheduler", "scheduler.json"))
    assert config.instances_file == "$(MOONCAKE_CONFIG_DIR)/instances.json"
    assert config.redis_url is None
    text = by_name(world.config_maps, "q-scheduler")["data"]["instances.json"]
    instances = {one.id: one for one in msgspec.json.decode(text, type=list[Instance])}
    first = instances["q-prefill-p-0"]
    assert (first.role, first.url, first.bootstrap_url) == (
        Role.PREFILL,
        "http://127.0.0.1:20000",
        "http://127.0.0.1:20001",
    )
    assert first.kv_capacity_tokens == 1_400_000 // 512 * 512
    assert (first.fetch, first.store, first.block_size_tokens) == ("store", "q-kv", 512)
    assert instances["q-decode-d-0"].bootstrap_url == ""
    store = instances["q-kv"]
    assert (store.role, store.url) == (Role.STORE, "http://127.0.0.1:20041")
    assert store.kv_capacity_tokens == 2 * 2**30 // 320_000


def test_both_sides_of_a_hand_over_carry_the_same_revision_though_their_pods_differ():
    a_cluster = cluster()
    world = render(a_cluster, ClusterNames())
    text = by_name(world.config_maps, "q-scheduler")["data"]["instances.json"]
    engines = [one for one in msgspec.json.decode(text, type=list[Instance]) if one.role is not Role.STORE]
    assert len({one.revision for one in engines}) == 1
    labels = {pod["metadata"]["labels"]["mooncake.io/revision"] for pod in world.pods}
    assert len(labels) == 4


def test_a_changed_model_changes_every_revision_and_a_changed_pool_only_its_own():
    def revisions(a_cluster):
        pods = render(a_cluster, ClusterNames()).pods
        return {pod["metadata"]["name"]: pod["metadata"]["labels"]["mooncake.io/revision"] for pod in pods}

    before = revisions(cluster())
    other_model = revisions(cluster(model={"name": "other"}))
    assert before["q-prefill-p-0"] != other_model["q-prefill-p-0"]
    assert before["q-decode-d-0"] != other_model["q-decode-d-0"]
    pool = [{"name": "decode", "replicas": 2, "resources": {"cpu": "4"}, "drain": {"timeoutSeconds": 60}}]
    other_pool = revisions(cluster(decodePools=pool))
    assert before["q-prefill-p-0"] == other_pool["q-prefill-p-0"]
    assert before["q-decode-d-0"] != other_pool["q-decode-d-0"]


def test_with_redis_each_engine_gets_a_sidecar_that_announces_it_by_its_own_address():
    a_cluster = cluster(scheduler=SHARED)
    world = render(a_cluster, ClusterNames(), credentials=SECRETS)
    pod = by_name(world.pods, "q-prefill-p-1")
    beside = container(pod, "sidecar")
    config = SidecarConfig.model_validate_json(env_of(beside)["MOONCAKE_SIDECAR_CONFIG"])
    assert config.instance == "q-prefill-p-1"
    assert config.engine_url == "http://127.0.0.1:21000"
    assert config.advertised_url == "http://$(MOONCAKE_POD_IP):21000"
    assert config.bootstrap_url == "http://$(MOONCAKE_POD_IP):21001"
    assert config.redis_url == "redis://q-redis.default.svc:21000/0"
    assert config.store_url == "http://q-kv-master.default.svc:21001"
    assert config.block_size_tokens == 512
    assert config.events_endpoint is not None
    published = json.loads(flag(container(pod, "engine")["args"], "--kv-events-config"))
    assert published["endpoint"] == config.events_endpoint
    assert published["replay_endpoint"] == config.replay_endpoint
    # Without a file there is nobody whose file it is: an engine may run as root, the sidecar does not.
    assert config.events_endpoint == "ipc://@$(MOONCAKE_RUN_DIR)/kv-events.sock"
    assert config.replay_endpoint == "ipc://@$(MOONCAKE_RUN_DIR)/kv-replay.sock"
    shared = {mount["name"] for mount in beside["volumeMounts"]}
    assert "run" in shared & {mount["name"] for mount in container(pod, "engine")["volumeMounts"]}


SSD = {"size": "1Ti", "path": "/data/kv"}


def with_ssd(**ssd):
    pool = {"name": "kv", "replicas": 1, "segmentSize": "8Ti", "ssd": SSD | ssd}
    return cluster(scheduler=SHARED, kvCachePools=[pool])


def test_where_a_store_has_ssds_schedulers_plan_its_promotion_and_sidecars_have_its_client():
    world = render(with_ssd(), ClusterNames(), credentials=SECRETS)
    assert document(world, "q-scheduler", "scheduler.json")["promoted_store"] == "q-kv"
    beside = container(by_name(world.pods, "q-prefill-p-0"), "sidecar")
    config = SidecarConfig.model_validate_json(env_of(beside)["MOONCAKE_SIDECAR_CONFIG"])
    assert config.store_client == "mooncake_simulator.store.client"
    assert config.store_address == "q-kv-master.default.svc:21000"
    master = container(by_name(world.pods, "q-kv-master-0"), "master")
    assert flag(master["args"], "--promotion-on-hit") == "true"


def test_promotion_that_is_not_wanted_is_not_planned_and_replaces_no_pod():
    wanted = render(with_ssd(), ClusterNames(), credentials=SECRETS)
    unwanted = render(with_ssd(promotion="None"), ClusterNames(), credentials=SECRETS)
    assert not document(unwanted, "q-scheduler", "scheduler.json").get("promoted_store")
    pods = {pod["metadata"]["name"]: pod for pod in wanted.pods}
    for pod in unwanted.pods:
        if "scheduler" not in pod["metadata"]["name"]:
            assert pod == pods[pod["metadata"]["name"]]


def test_without_redis_nobody_listens_so_that_no_events_are_published():
    world = render(cluster(), ClusterNames())
    engine = container(by_name(world.pods, "q-prefill-p-0"), "engine")
    assert "--kv-events-config" not in engine["args"]
    assert "lifecycle" not in engine
    assert len(by_name(world.pods, "q-prefill-p-0")["spec"]["containers"]) == 1


def test_a_drain_ends_before_the_grace_period_does():
    world = render(cluster(scheduler=SHARED), ClusterNames(), credentials=SECRETS)
    pod = by_name(world.pods, "q-decode-d-0")
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60 + 30
    engine = container(pod, "engine")
    hook = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["python", "-m", "mooncake_sidecar.engine", "drain"]
    told = SidecarConfig.model_validate_json(env_of(engine)["MOONCAKE_SIDECAR_CONFIG"])
    assert (told.listen.port, told.drain_timeout_s) == (21003, 60)


@pytest.mark.parametrize("connector", ["MooncakeConnector", "NixlConnector"])
def test_kv_that_nobody_fetches_is_kept_no_longer_than_a_scheduler_waits_for_its_decode(connector):
    a_cluster = cluster(engine=VLLM | {"connector": connector}, kvCachePools=[])
    engine = container(by_name(render(a_cluster, ClusterNames()).pods, "q-prefill-p-0"), "engine")
    config = json.loads(flag(engine["args"], "--kv-transfer-config"))["kv_connector_extra_config"]
    waited_s = SchedulerConfig.model_fields["first_token_timeout_s"].default
    if connector == "MooncakeConnector":
        kept_s = int(env_of(engine)["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"])
        assert waited_s < kept_s < 2 * waited_s
    else:
        # A decode that waits extends it by heartbeats.
        assert 0 < config["kv_lease_duration"] < waited_s


def test_a_scheduler_ends_within_its_grace_period_and_outlasts_the_endpoints_that_lead_to_it():
    world = render(cluster(scheduler=SHARED), ClusterNames(), credentials=SECRETS)
    (deployment,) = world.deployments
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    stopping = document(world, "q-scheduler", "scheduler.json")["stopping"]
    assert stopping["announced_s"] > 0
    assert stopping["announced_s"] + stopping["streams_s"] < grace_s


def test_nobody_waits_for_a_local_scheduler_that_no_endpoint_leads_to():
    shared = cluster(scheduler=SHARED)
    world = render(shared, local(shared), credentials=SECRETS)
    assert document(world, "q-scheduler", "scheduler.json")["stopping"]["announced_s"] == 0


@pytest.mark.parametrize("engine", [SIMULATED, VLLM])
def test_who_is_stuck_is_ended_at_once_and_not_after_the_grace_of_a_drain(engine):
    world = render(cluster(engine=engine, scheduler=SHARED), ClusterNames(), credentials=SECRETS)
    (deployment,) = world.deployments
    for pod in (*world.pods, deployment["spec"]["template"]):
        for each in pod["spec"]["containers"]:
            assert "startupProbe" in each, each["name"]
            if pod["spec"]["terminationGracePeriodSeconds"] > 30:
                assert each["livenessProbe"]["terminationGracePeriodSeconds"] <= 30


def test_a_signal_before_a_program_has_its_handlers_ends_it():
    world = render(cluster(scheduler=SHARED), ClusterNames(), credentials=SECRETS)
    (deployment,) = world.deployments
    for pod in (*world.pods, deployment["spec"]["template"]):
        assert pod["spec"]["shareProcessNamespace"], "the first process of a namespace would ignore it"


def test_an_image_without_this_product_drains_with_what_every_python_has():
    world = render(cluster(engine=VLLM, scheduler=SHARED), ClusterNames(), credentials=SECRETS)
    engine = container(by_name(world.pods, "q-decode-d-0"), "engine")
    python, switch, program = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert (python, switch) == ("python", "-c")
    compile(program, "preStop", "exec")
    assert "http://127.0.0.1:21003/drain" in program
    assert "timeout=60" in program


@pytest.mark.parametrize(("pool", "role"), [("prefill-p", "kv_producer"), ("decode-d", "kv_consumer")])
def test_with_a_store_engines_hand_over_and_store_through_a_multi_connector(pool, role):
    world = render(cluster(), ClusterNames())
    arguments = container(by_name(world.pods, f"q-{pool}-0"), "engine")["args"]
    config = json.loads(flag(arguments, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", role)
    hand_over, store = config["kv_connector_extra_config"]["connectors"]
    assert (hand_over["kv_connector"], hand_over["kv_role"]) == ("MooncakeConnector", role)
    assert (store["kv_connector"], store["kv_role"]) == ("MooncakeStoreConnector", "kv_both")


def test_without_a_store_engines_have_the_hand_over_alone():
    world = render(cluster(kvCachePools=[]), ClusterNames())
    engine = container(by_name(world.pods, "q-prefill-p-0"), "engine")
    config = json.loads(flag(engine["args"], "--kv-transfer-config"))
    assert config["kv_connector"] == "MooncakeConnector"
    assert config["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}
    assert "MOONCAKE_CONFIG_PATH" not in env_of(engine)


@pytest.mark.parametrize(
    ("connector", "store", "hidden"),
    [("MooncakeConnector", True, True), ("MooncakeConnector", False, False), ("NixlConnector", True, False)],
)
def test_statistics_are_off_only_where_they_would_end_the_engine(connector, store, hidden):
    kv = [{"name": "kv", "segmentSize": "1Gi"}] if store else []
    world = render(cluster(engine={**VLLM, "connector": connector}, kvCachePools=kv), ClusterNames())
    arguments = container(by_name(world.pods, "q-prefill-p-0"), "engine")["args"]
    assert ("--disable-log-stats" in arguments) is hidden


def test_simulated_engines_keep_their_statistics():
    arguments = container(by_name(render(cluster(), ClusterNames()).pods, "q-prefill-p-0"), "engine")["args"]
    assert "--disable-log-stats" not in arguments


def test_real_engines_get_vllm_its_parallelism_and_its_devices():
    pool = {
        "name": "prefill",
        "instance": {"parallelism": {"tensor": 4, "pipeline": 2}},
        "resources": {"gpu": {"count": 8}, "memory": "512Gi", "sharedMemory": "64Gi"},
    }
    volume = {"persistentVolumeClaim": {"claimName": "models"}}
    model = {"name": "kimi-k2", "path": "/models/kimi-k2", "volume": volume}
    world = render(cluster(engine=VLLM, prefillPools=[pool], model=model), ClusterNames())
    pod = by_name(world.pods, "q-prefill-p-0")
    engine = container(pod, "engine")
    assert engine["command"] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert flag(engine["args"], "--model") == "/models/kimi-k2"
    assert flag(engine["args"], "--served-model-name") == "kimi-k2"
    assert flag(engine["args"], "--tensor-parallel-size") == "4"
    assert flag(engine["args"], "--pipeline-parallel-size") == "2"
    assert "--profile" not in engine["args"]
    assert engine["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8"}
    mounts = {mount["mountPath"]: mount for mount in engine["volumeMounts"]}
    assert mounts["/models/kimi-k2"]["readOnly"] is True
    assert "/dev/shm" in mounts
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert volumes["model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_user_arguments_come_last_and_tell_the_registry_what_they_say():
    engine = {
        "type": "Simulated",
        "blockSize": 16,
        "args": ["--max-model-len", "4096", "--num-gpu-blocks-override=101", "--max_num_seqs=8"],
    }
    world = render(cluster(engine=engine), ClusterNames())
    arguments = container(by_name(world.pods, "q-prefill-p-0"), "engine")["args"]
    assert arguments[-4:] == engine["args"]
    text = by_name(world.config_maps, "q-scheduler")["data"]["instances.json"]
    one = msgspec.json.decode(text, type=list[Instance])[0]
    assert (one.max_model_len_tokens, one.kv_capacity_tokens, one.max_batch) == (4096, 100 * 16, 8)


def test_local_schedulers_share_the_serving_port_and_have_admin_ports_of_their_own():
    a_cluster = cluster(scheduler={"replicas": 3, "redis": {"managed": {}}})
    names = local(a_cluster)
    world = render(a_cluster, names, credentials=SECRETS)
    arguments = [container(pod, "scheduler")["args"] for pod in world.scheduler_pods]
    assert {flag(one, "--serving-port") for one in arguments} == {"8000"}
    assert len({flag(one, "--admin-port") for one in arguments}) == 3
    (deployment,) = world.deployments
    assert deployment["spec"]["replicas"] == 3


def test_the_scheduler_is_told_what_the_manifest_says():
    a_cluster = cluster(
        slo={"ttft": {"multiplier": "10"}, "tbt": {"percentile": 99, "target": "100ms"}},
        scheduler={
            "routing": {
                "policy": "kv-centric",
                "balancingThreshold": "2.5",
                "disaggregationThresholdTokens": 512,
                "seed": 7,
            },
            "admission": {"mode": "early"},
        },
        metadata={"namespace": "llm"},
    )
    world = render(a_cluster, ClusterNames())
    config = SchedulerConfig.model_validate(document(world, "q-scheduler", "scheduler.json"))
    assert (config.slo.ttft_s, config.slo.ttft_multiplier) == (None, 10.0)
    assert (config.slo.tbt_s, config.slo.tbt_percentile) == (0.1, 99)
    assert (config.routing.policy, config.routing.balancing_threshold) == ("kv-centric", 2.5)
    assert (config.routing.disaggregation_threshold_tokens, config.routing.seed) == (512, 7)
    assert config.admission.mode is AdmissionMode.EARLY
    assert (config.time_scale, config.profile) == (10.0, "llama3-70b-8xa800")
    assert config.namespace == "llm.q"


def test_prompts_are_always_computed_apart_and_chance_is_left_alone_unless_the_manifest_says_otherwise():
    world = render(cluster(), ClusterNames())
    config = SchedulerConfig.model_validate(document(world, "q-scheduler", "scheduler.json"))
    assert (config.routing.disaggregation_threshold_tokens, config.routing.seed) == (0, None)


def test_a_changed_configuration_restarts_schedulers_and_changed_instances_do_not():
    def mark(a_cluster):
        (deployment,) = render(a_cluster, ClusterNames()).deployments
        return deployment["spec"]["template"]["metadata"]["annotations"]["mooncake.io/config"]

    more = [{"name": "decode", "replicas": 5}]
    assert mark(cluster()) == mark(cluster(decodePools=more))
    assert mark(cluster()) != mark(cluster(scheduler={"routing": {"policy": "random"}}))


def test_the_model_folder_is_the_schedulers_only_where_it_can_see_it():
    def model_path(a_cluster, names):
        return document(render(a_cluster, names), "q-scheduler", "scheduler.json").get("model_path")

    in_image = cluster(model={"name": "m", "path": "/models/m"})
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    mounted = cluster(model={"name": "m", "path": "/models/m", "volume": claim})
    assert model_path(in_image, ClusterNames()) is None
    assert model_path(in_image, local(in_image)) == "/models/m"
    assert model_path(mounted, ClusterNames()) == "/models/m"


def test_keys_and_tokens_come_as_files_of_secrets():
    a_cluster = cluster(scheduler={"auth": {"apiKeySecretRef": {"name": "keys"}}})
    world = render(a_cluster, ClusterNames(), credentials=Credentials(admin_token="t0ken"))
    config = SchedulerConfig.model_validate(document(world, "q-scheduler", "scheduler.json"))
    assert config.auth.api_keys_file == "$(MOONCAKE_API_KEYS_DIR)/keys.json"
    assert config.auth.admin_token_file == "$(MOONCAKE_ADMIN_DIR)/token"
    assert by_name(world.secrets, "q-admin")["stringData"] == {"token": "t0ken"}
    assert "t0ken" not in json.dumps([*world.pods, *world.deployments, *world.config_maps])


def test_a_redis_of_the_user_is_reached_through_its_secret():
    a_cluster = cluster(scheduler={"replicas": 2, "redis": {"secretRef": {"name": "redis"}}})
    world = render(a_cluster, ClusterNames())
    config = document(world, "q-scheduler", "scheduler.json")
    assert config["redis_url"] == "$(MOONCAKE_REDIS_URL)"
    source = [item for item in container(world.scheduler_pods[0], "scheduler")["env"] if "valueFrom" in item]
    assert source[-1]["valueFrom"] == {"secretKeyRef": {"name": "redis", "key": "url"}}
    assert world.secrets == ()


def test_the_password_of_the_managed_redis_is_in_its_secret_only():
    a_cluster = cluster(scheduler=SHARED)
    world = render(a_cluster, ClusterNames(), credentials=SECRETS)
    assert by_name(world.secrets, "q-redis")["stringData"]["password"] == "s3cret"
    public = [*world.pods, *world.scheduler_pods, *world.deployments, *world.config_maps, *world.services]
    assert "s3cret" not in json.dumps(public)
    assert "s3cret" not in repr(SECRETS)


@pytest.mark.parametrize("user", [65532, 1000650000, None])
def test_redis_runs_as_the_user_that_is_set_or_as_the_one_that_the_platform_gives(user):
    world = render(
        cluster(scheduler=SHARED), ClusterNames(), images=Images(redis_user=user), credentials=SECRETS
    )
    redis = container(by_name(world.pods, "q-redis-0"), "redis")["securityContext"]
    assert redis.get("runAsUser") == user
    assert redis["runAsNonRoot"]


@pytest.mark.parametrize("password", ["", "two words", "line\nbreak"])
def test_a_managed_redis_without_a_usable_password_is_refused(password):
    with pytest.raises(ValueError, match="token_hex"):
        render(cluster(scheduler=SHARED), ClusterNames(), credentials=Credentials(redis_password=password))


def test_real_store_programs_get_mooncakes_own_flags():
    world = render(cluster(engine=VLLM), ClusterNames())
    master = container(by_name(world.pods, "q-kv-master-0"), "master")
    assert master["command"] == ["mooncake_master"]
    assert {"--rpc_port=21000", "--metrics_port=21001", "--eviction_high_watermark_ratio=0.90"} <= {
        *master["args"]
    }
    node = container(by_name(world.pods, "q-kv-kv-1"), "node")
    assert node["command"] == ["mooncake_client"]
    assert {
        "--host=$(MOONCAKE_POD_IP)",
        f"--global_segment_size={2**30}",
        "--master_server_address=q-kv-master.default.svc:21000",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
    } <= {*node["args"]}
    config = document(world, "q-engine", "mooncake.json")
    assert config["master_server_address"] == "q-kv-master.default.svc:21000"
    assert (config["mode"], config["global_segment_size"]) == ("standalone-store", 0)


def test_a_pool_template_is_merged_by_name_and_cannot_lead_selectors_astray():
    template = {
        "metadata": {"labels": {"team": "llm"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"gpu": "a800"},
            "tolerations": [{"key": "gpu"}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                },
                {"name": "logs", "image": "fluent-bit"},
            ],
        },
    }
    world = render(cluster(prefillPools=[{"name": "prefill", "podTemplate": template}]), ClusterNames())
    pod = by_name(world.pods, "q-prefill-p-0")
    assert pod["metadata"]["labels"]["team"] == "llm"
    assert pod["metadata"]["labels"]["mooncake.io/pool"] == "q-prefill"
    assert pod["metadata"]["annotations"] == {"note": "x"}
    assert pod["spec"]["nodeSelector"] == {"gpu": "a800"}
    assert [one["name"] for one in pod["spec"]["containers"]] == ["engine", "logs"]
    engine = container(pod, "engine")
    assert env_of(engine)["NCCL_DEBUG"] == "INFO"
    assert env_of(engine)["PYTHONHASHSEED"] == "0"
    assert {mount["mountPath"] for mount in engine["volumeMounts"]} >= {"/scratch", "/etc/mooncake"}


def test_a_stores_nodes_are_placed_where_its_template_says():
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    template = {"spec": {"nodeSelector": {"dram": "large"}, "affinity": affinity}}
    store = {"name": "kv", "segmentSize": "1Gi", "replicas": 2, "podTemplate": template}
    world = render(cluster(kvCachePools=[store]), ClusterNames())
    for node in ("q-kv-kv-0", "q-kv-kv-1"):
        spec = by_name(world.pods, node)["spec"]
        assert spec["nodeSelector"] == {"dram": "large"}
        assert spec["affinity"] == affinity


def asked_for(pod, name):
    return container(pod, name).get("resources")


def test_schedulers_and_redis_are_placed_where_their_templates_say_on_a_cluster_and_on_a_machine():
    def template(main):
        metadata = {"labels": {"team": main}, "annotations": {"note": main, "mooncake.io/config": "x"}}
        own = {"name": main, "env": [{"name": "TZ", "value": "UTC"}]}
        return {"metadata": metadata, "spec": {"tolerations": [{"key": main}], "containers": [own]}}

    shared = {"replicas": 2, "podTemplate": template("scheduler")}
    shared["redis"] = {"managed": {"podTemplate": template("redis")}}
    a_cluster, plain = cluster(scheduler=shared), cluster(scheduler=SHARED)
    world = render(a_cluster, ClusterNames(), credentials=SECRETS)
    on_machine = render(a_cluster, local(a_cluster), credentials=SECRETS)
    (deployment,) = world.deployments
    (untouched,) = render(plain, ClusterNames(), credentials=SECRETS).deployments
    rendered = [
        (deployment["spec"]["template"], "scheduler"),
        *((pod, "scheduler") for pod in (*world.scheduler_pods, *on_machine.scheduler_pods)),
        *((by_name(each.pods, "q-redis-0"), "redis") for each in (world, on_machine)),
    ]
    for pod, main in rendered:
        assert pod["metadata"]["labels"]["team"] == main
        assert pod["metadata"]["labels"]["mooncake.io/role"] == main
        assert pod["metadata"]["annotations"]["note"] == main
        assert pod["spec"]["tolerations"] == [{"key": main}]
        assert {"MOONCAKE_POD_IP", "TZ"} <= env_of(container(pod, main)).keys()
    # What restarts them when configuration or password change stays the product's.
    annotations = [each["spec"]["template"]["metadata"]["annotations"] for each in (deployment, untouched)]
    assert annotations[0]["mooncake.io/config"] == annotations[1]["mooncake.io/config"]
    assert by_name(world.pods, "q-redis-0")["metadata"]["annotations"].keys() >= {"mooncake.io/password-hash"}
    assert deployment["spec"]["selector"] == untouched["spec"]["selector"]


def test_schedulers_redis_and_sidecars_ask_for_a_little_without_a_limit():
    world = render(cluster(scheduler=SHARED), ClusterNames(), credentials=SECRETS)
    (deployment,) = world.deployments
    asking = [
        asked_for(deployment["spec"]["template"], "scheduler"),
        asked_for(world.scheduler_pods[1], "scheduler"),
        asked_for(by_name(world.pods, "q-redis-0"), "redis"),
        asked_for(by_name(world.pods, "q-prefill-p-0"), "sidecar"),
    ]
    for resources in asking:
        assert resources.keys() == {"requests"}
        assert resources["requests"].keys() == {"cpu", "memory"}
    assert asked_for(by_name(world.pods, "q-prefill-p-0"), "engine") is None


def test_what_a_user_asks_for_replaces_the_products_request_as_a_whole():
    def own(name, **resources):
        return {"spec": {"containers": [{"name": name, "resources": resources}]}}

    small = {"limits": {"memory": "64Mi"}}
    shared = {"podTemplate": own("scheduler", **small), "redis": {"managed": {"podTemplate": own("redis")}}}
    engine = {"name": "engine", "resources": {"limits": {"rdma/hca": "1"}}}
    containers = [{"name": "sidecar", "resources": small}, engine]
    pool = {"name": "prefill", "resources": {"cpu": "4"}, "podTemplate": {"spec": {"containers": containers}}}
    world = render(cluster(scheduler=shared, prefillPools=[pool]), ClusterNames(), credentials=SECRETS)
    (deployment,) = world.deployments
    assert asked_for(deployment["spec"]["template"], "scheduler") == small
    assert asked_for(by_name(world.pods, "q-redis-0"), "redis") == {}
    pod = by_name(world.pods, "q-prefill-p-0")
    assert asked_for(pod, "sidecar") == small
    # What a pool says of its engines is the user's too: the two are one wish.
    assert asked_for(pod, "engine") == {"requests": {"cpu": "4"}, "limits": {"cpu": "4", "rdma/hca": "1"}}


def test_what_a_template_leaves_without_a_value_takes_nothing_away():
    engine = {"name": "engine", "resources": None, "securityContext": None}
    pool = {"name": "prefill", "resources": {"gpu": {"count": 1}}}
    plain = render(cluster(prefillPools=[pool]), ClusterNames())
    pool["podTemplate"] = {"spec": {"containers": [engine], "volumes": []}}
    world = render(cluster(prefillPools=[pool]), ClusterNames())
    pod = by_name(world.pods, "q-prefill-p-0")
    assert asked_for(pod, "engine")["limits"] == {"nvidia.com/gpu": "1"}
    assert pod["spec"] == by_name(plain.pods, "q-prefill-p-0")["spec"]


def test_a_sidecar_is_not_added_where_there_is_none_nor_mistaken_for_a_users_container():
    containers = [
        {"name": "sidecar", "resources": {"limits": {"cpu": "1"}}},
        {"name": "redis", "image": "redis"},
    ]
    pool = {"name": "prefill", "podTemplate": {"spec": {"containers": containers}}}
    world = render(cluster(prefillPools=[pool]), ClusterNames())
    pod = by_name(world.pods, "q-prefill-p-0")
    assert [each["name"] for each in pod["spec"]["containers"]] == ["engine", "redis"]
    assert asked_for(pod, "redis") is None


def test_pools_of_their_own_join_the_cluster_they_name():
    pool = parse_object(
        {
            "apiVersion": "mooncake.io/v1alpha1",
            "kind": "MooncakeDecodePool",
            "metadata": {"name": "more"},
            "spec": {"clusterRef": {"name": "q"}, "replicas": 1},
        }
    )
    assert isinstance(pool, MooncakeDecodePool)
    world = render(cluster(), ClusterNames(), [pool])
    assert by_name(world.pods, "more-d-0")["metadata"]["labels"]["mooncake.io/cluster"] == "q"
    assert "more" not in [item["metadata"]["name"] for item in world.pools]
    with pytest.raises(ValueError, match="pool more: its clusterRef does not name cluster other"):
        render(cluster(metadata={"name": "other"}), ClusterNames(), [pool])


def test_only_names_of_what_a_cluster_makes_itself_are_kept_from_pools_of_their_own():
    def with_pool(name, kind, redis):
        spec = {"clusterRef": {"name": "q"}}
        if kind == "MooncakeKVCachePool":
            spec["segmentSize"] = "1Gi"
        manifest = {
            "apiVersion": "mooncake.io/v1alpha1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        wanted = cluster(scheduler={"replicas": 2, "redis": redis}, kvCachePools=[])
        return render(wanted, ClusterNames(), [parse_object(manifest)], credentials=SECRETS)

    managed, external = {"managed": {}}, {"secretRef": {"name": "redis"}}
    for kind in ("MooncakeDecodePool", "MooncakeKVCachePool"):
        for name, redis in (("q-scheduler", external), ("q-redis", managed)):
            with pytest.raises(ValueError, match="is the name of the cluster's own objects; rename it"):
                with_pool(name, kind, redis)
        for name, redis in (("q-admin", managed), ("q-redis", external)):
            world = with_pool(name, kind, redis)
            assert any(pod["metadata"]["name"].startswith(f"{name}-") for pod in world.pods)
            made = [(each["kind"], each["metadata"]["name"]) for each in world.for_kubernetes()]
            assert len(made) == len(set(made))


def test_a_second_store_is_refused_whichever_way_it_was_written():
    pool = parse_object(
        {
            "apiVersion": "mooncake.io/v1alpha1",
            "kind": "MooncakeKVCachePool",
            "metadata": {"name": "kv2"},
            "spec": {"clusterRef": {"name": "q"}, "segmentSize": "1Gi"},
        }
    )
    with pytest.raises(ValueError, match="pool kv2: more than one store"):
        render(cluster(), ClusterNames(), [pool])
