"""Leader and workers: command lines, addresses, and what each of an instance's Pods has."""

import http.server
import subprocess
import sys
import threading
import time

import pytest

from mooncake_core.api import parse_object
from mooncake_core.config import SchedulerConfig, SidecarConfig
from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_operator.planning import ClusterNames, Credentials, Images, LocalNames, pod_names, render
from mooncake_operator.planning.actions import CreatePod
from mooncake_operator.planning.manifests.disruption import (
    disruption_budgets,
    with_something_to_protect,
)
from mooncake_operator.planning.manifests.plan import Present, plan_of
from mooncake_operator.planning.manifests.render import render_plan
from mooncake_operator.planning.manifests.revisions import controller_revision, owner_reference, pod_of
from mooncake_operator.planning.manifests.services import still_looked_up
from mooncake_operator.planning.reading import observed_pod, observed_revision
from mooncake_operator.planning.wishes import Identity, desired_cluster
from mooncake_scheduler.assembly import starting_costs
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.engine.options import parse

SECRETS = Credentials(redis_password="s3cret")
VLLM = {"type": "vLLM", "image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=131072"]}
SIMULATED = {"type": "Simulated", "blockSize": 512, "simulated": {"timeScale": 10}}
PREFILL = {
    "name": "prefill",
    "replicas": 2,
    "instance": {"size": 2, "parallelism": {"tensor": 8, "pipeline": 2}},
    "resources": {"gpu": {"count": 8}, "memory": "512Gi", "sharedMemory": "64Gi"},
    "drain": {"timeoutSeconds": 60},
}


def cluster(*, engine=VLLM, prefill=PREFILL, redis=True, **spec):
    base = {
        "model": {
            "name": "kimi-k2",
            "path": "/models/kimi-k2",
            "volume": {"persistentVolumeClaim": {"claimName": "models"}},
        },
        "engine": engine,
        "prefillPools": [prefill],
        "decodePools": [{"name": "decode"}],
        "kvCachePools": [{"name": "kv", "segmentSize": "1Gi"}],
        "scheduler": {"redis": {"managed": {}}} if redis else {},
    }
    document = {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": "q"},
        "spec": {**base, **spec},
    }
    return parse_object(document)


def pods_of(a_cluster, names=None):
    world = render(a_cluster, names or ClusterNames(), credentials=SECRETS)
    return {pod["metadata"]["name"]: pod for pod in world.pods}


def engine_of(pod):
    (found,) = [item for item in pod["spec"]["containers"] if item["name"] == "engine"]
    return found


def env_of(container):
    return {item["name"]: item.get("value") for item in container["env"]}


def flag(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_workers_are_called_after_their_leader():
    assert pod_names(cluster())[:4] == [
        *("q-prefill-p-0", "q-prefill-p-0-w1", "q-prefill-p-1", "q-prefill-p-1-w1"),
    ]


def test_the_longest_names_fit_into_a_host_name():
    prefill = {
        **PREFILL,
        "name": "p" * 38,
        "replicas": 1000,
        "instance": {"size": 64, "parallelism": {"tensor": 64}},
        "resources": {},
    }
    assert max(map(len, pod_names(cluster(prefill=prefill)))) == 40 + len("-p-999-w63") <= 63


def test_vllm_is_told_who_it_is_among_the_processes_of_one_engine():
    pods = pods_of(cluster(kvCachePools=[]))
    leader, worker = engine_of(pods["q-prefill-p-1"]), engine_of(pods["q-prefill-p-1-w1"])
    transfer = (
        '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer",'
        '"kv_connector_extra_config":{"mooncake_protocol":"tcp"}}'
    )

    def alike(rank):
        return [
            *("--block-size", "16", "--tensor-parallel-size", "8", "--pipeline-parallel-size", "2"),
            *("--max-num-batched-tokens", "2048"),
            *("--nnodes", "2", "--node-rank", rank),
            *("--master-addr", "q-prefill-p-1.q-prefill.default.svc", "--master-port", "21006"),
            *("--distributed-executor-backend", "mp", "--kv-transfer-config", transfer),
            "--max-model-len=131072",
        ]

    assert worker["command"] == ["python", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert worker["args"] == ["/models/kimi-k2", "--headless", *alike("1")]
    assert leader["command"] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    served = len(leader["args"]) - len(alike("0"))
    assert leader["args"][served:] == alike("0")
    assert flag(leader["args"][:served], "--port") == "21000"
    assert {"--headless", "--kv-events-config"} & {*leader["args"]} == {"--kv-events-config"}


def test_an_instance_of_one_pod_is_told_nothing_of_groups():
    engine = engine_of(pods_of(cluster())["q-decode-d-0"])
    assert "--nnodes" not in engine["args"]
    assert "--distributed-executor-backend" not in engine["args"]
    assert not [name for name in env_of(engine) if name.startswith("MOONCAKE_INSTANCE")]


def test_every_pod_knows_size_rank_and_leader_and_the_bootstrap_port_is_the_leaders():
    a_cluster = cluster()
    bases = {pod: 20_000 + 10 * n for n, pod in enumerate(pod_names(a_cluster))}
    pods = pods_of(a_cluster, LocalNames(bases))
    for rank, name in enumerate(("q-prefill-p-1", "q-prefill-p-1-w1")):
        environment = env_of(engine_of(pods[name]))
        assert environment["MOONCAKE_INSTANCE_SIZE"] == "2"
        assert environment["MOONCAKE_INSTANCE_RANK"] == str(rank)
        assert environment["MOONCAKE_LEADER_ADDRESS"] == "127.0.0.1"
        assert environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "20021"
        assert flag(engine_of(pods[name])["args"], "--master-port") == "20026"


def test_all_pods_of_an_instance_have_model_memory_and_devices():
    pods = pods_of(cluster())
    for name in ("q-prefill-p-0", "q-prefill-p-0-w1"):
        engine = engine_of(pods[name])
        assert engine["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8"}
        mounted = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
        assert mounted.items() >= {"model": "/models/kimi-k2", "shm": "/dev/shm"}.items()
        volumes = {volume["name"]: volume for volume in pods[name]["spec"]["volumes"]}
        assert volumes["model"]["persistentVolumeClaim"]["claimName"] == "models"
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
        assert pods[name]["spec"]["terminationGracePeriodSeconds"] == 90
        assert "MOONCAKE_CONFIG_PATH" in env_of(engine), "a worker puts its part of the KV into the store"


def test_only_the_leader_serves_has_a_sidecar_and_is_probed():
    pods = pods_of(cluster())
    leader, worker = pods["q-prefill-p-0"], pods["q-prefill-p-0-w1"]
    assert [c["name"] for c in leader["spec"]["containers"]] == ["engine", "sidecar"]
    assert [c["name"] for c in worker["spec"]["containers"]] == ["engine"]
    assert {p["name"] for p in engine_of(leader)["ports"]} >= {"http", "bootstrap", "group"}
    assert not engine_of(worker)["ports"]
    assert "readinessProbe" in engine_of(leader)
    assert not [field for field in engine_of(worker) if field.endswith("Probe")]
    assert {volume["name"] for volume in worker["spec"]["volumes"]} == {"model", "shm", "config"}
    sidecar = env_of(leader["spec"]["containers"][1])["MOONCAKE_SIDECAR_CONFIG"]
    assert SidecarConfig.model_validate_json(sidecar).pipeline_stages == 2


def test_the_leader_is_found_before_it_is_ready():
    world = render(cluster(), ClusterNames(), credentials=SECRETS)
    (service,) = [s for s in world.services if s["metadata"]["name"] == "q-prefill"]
    leader = pods_of(cluster())["q-prefill-p-0"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    assert (leader["spec"]["hostname"], leader["spec"]["subdomain"]) == ("q-prefill-p-0", "q-prefill")


def test_pools_have_a_service_while_their_pods_are_found_by_name_and_else_none():
    def services(a_cluster, present=None):
        plan = plan_of(a_cluster, ClusterNames(), [], images=Images(), credentials=SECRETS, present=present)
        return {s["metadata"]["name"] for s in render_plan(plan).services} & {"q-prefill", "q-decode"}

    alone = {"name": "prefill"}
    assert services(cluster()) == {"q-prefill"}
    assert services(cluster(prefill=alone)) == set()
    # Those that were made with workers still look for their leader.
    there = {"q-prefill": (Present("q-prefill-p-0", "g0", size=2),)}
    assert services(cluster(prefill=alone), there) == {"q-prefill"}
    # Without sidecars nobody tells schedulers an address.
    assert services(cluster(prefill=alone, engine=SIMULATED, redis=False)) == {"q-prefill", "q-decode"}


def test_instances_are_spread_and_their_pods_kept_together():
    key = "topology.kubernetes.io/rack"
    pods = pods_of(cluster(prefill={**PREFILL, "scheduling": {"spreadTopologyKey": key}}))
    leader, worker = pods["q-prefill-p-0"], pods["q-prefill-p-0-w1"]
    (constraint,) = leader["spec"]["topologySpreadConstraints"]
    counted = constraint["labelSelector"]["matchLabels"].items()
    chosen = [name for name, pod in pods.items() if counted <= pod["metadata"]["labels"].items()]
    assert (constraint["topologyKey"], chosen) == (key, ["q-prefill-p-0", "q-prefill-p-1"])
    assert "topologySpreadConstraints" not in worker["spec"]
    near = worker["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (wish,) = near
    wanted = wish["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
    assert wish["podAffinityTerm"]["topologyKey"] == key
    assert [n for n, pod in pods.items() if wanted <= pod["metadata"]["labels"].items()] == ["q-prefill-p-0"]


def test_a_users_template_reaches_every_pod_and_adds_to_the_affinity():
    template = {
        "spec": {
            "nodeSelector": {"gpu": "h800"},
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "containers": [
                {"name": "engine", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                {"name": "sidecar", "resources": {"limits": {"cpu": "1"}}},
            ],
        }
    }
    scheduling = {"spreadTopologyKey": "kubernetes.io/hostname"}
    pods = pods_of(cluster(prefill={**PREFILL, "scheduling": scheduling, "podTemplate": template}))
    for name in ("q-prefill-p-0", "q-prefill-p-0-w1"):
        assert pods[name]["spec"]["nodeSelector"] == {"gpu": "h800"}
        assert env_of(engine_of(pods[name]))["NCCL_DEBUG"] == "INFO"
    assert pods["q-prefill-p-0-w1"]["spec"]["affinity"].keys() == {"podAffinity", "nodeAffinity"}
    # Workers have no sidecar, whatever it may ask for.
    sidecars = {
        name: [c["resources"] for c in pods[name]["spec"]["containers"] if c["name"] == "sidecar"]
        for name in ("q-prefill-p-0", "q-prefill-p-0-w1")
    }
    assert sidecars == {"q-prefill-p-0": [{"limits": {"cpu": "1"}}], "q-prefill-p-0-w1": []}


def test_a_budget_keeps_as_many_pods_as_leave_enough_instances_whole():
    world = render(cluster(), ClusterNames(), credentials=SECRETS)
    (budget,) = [b for b in world.disruption_budgets if b["metadata"]["name"] == "q-prefill"]
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    assert sum(wanted <= pod["metadata"]["labels"].items() for pod in world.pods) == 4
    assert budget["spec"]["minAvailable"] == 3


def test_a_budget_counts_the_instances_that_are_there_while_their_size_changes():
    there = {"q-prefill": [Present(f"q-prefill-p-{n}", "g", size) for n, size in enumerate((1, 1, 2))]}
    plan = plan_of(cluster(), ClusterNames(), (), images=Images(), credentials=SECRETS, present=there)
    (budget,) = [b for b in disruption_budgets(plan) if b["metadata"]["name"] == "q-prefill"]
    # Three instances of four Pods, of which one must stay.
    assert budget["spec"]["minAvailable"] == 2


def test_simulated_engines_understand_what_leader_and_worker_are_told():
    pods = pods_of(cluster(engine=SIMULATED))
    for rank, name in enumerate(("q-prefill-p-0", "q-prefill-p-0-w1")):
        options = parse(engine_of(pods[name])["args"], {})
        assert options.unknown_flags == ()
        assert (options.group.nodes, options.group.rank, options.group.port) == (2, rank, 21006)
        assert options.profile == LLAMA3_70B_A800.over(2, tensor=8, pipeline=2)
    sidecar = env_of(pods["q-prefill-p-0"]["spec"]["containers"][1])["MOONCAKE_SIDECAR_CONFIG"]
    capacity = SidecarConfig.model_validate_json(sidecar).kv_capacity_tokens
    assert capacity == 2 * LLAMA3_70B_A800.kv_capacity_tokens // 512 * 512


def test_schedulers_start_from_the_speed_of_all_pods_of_an_instance():
    world = render(cluster(engine=SIMULATED), ClusterNames(), credentials=SECRETS)
    (text,) = [m["data"]["scheduler.json"] for m in world.config_maps if "scheduler.json" in m["data"]]
    costs = starting_costs(SchedulerConfig.model_validate_json(text))
    one, two = LLAMA3_70B_A800, LLAMA3_70B_A800.over(2, tensor=8, pipeline=2)
    assert costs.of_class("q-prefill") == CostModel.from_profile(two)
    assert costs.of_class("q-decode") == CostModel.from_profile(one)
    # One after the other at twice the pace; alone, the last of four chunks passes the second stage, too.
    assert costs.of_class("q-prefill").occupied_s(8192, 0) == pytest.approx(
        costs.of_class("q-decode").prefill_s(8192, 0) / 2
    )
    assert costs.of_class("q-prefill").prefill_s(8192, 0) == pytest.approx(
        costs.of_class("q-decode").prefill_s(8192, 0) / 2
        + costs.of_class("q-decode").prefill_s(8192, 6144) / 2
    )


def test_real_engines_are_learnt():
    world = render(cluster(), ClusterNames(), credentials=SECRETS)
    (text,) = [m["data"]["scheduler.json"] for m in world.config_maps if "scheduler.json" in m["data"]]
    assert SchedulerConfig.model_validate_json(text).shapes == {}


@pytest.mark.parametrize(
    ("tensor", "pipeline", "weights", "batch"),
    [(8, 2, 1, 2), (16, 1, 2, 2), (2, 1, 2, 2), (4, 1, 2, 2)],
    ids=["stages apart", "layers apart", "one GPU each", "two GPUs each"],
)
def test_only_pods_that_share_a_layer_shorten_the_reading_of_weights(tensor, pipeline, weights, batch):
    one = LLAMA3_70B_A800
    two = one.over(2, tensor=tensor, pipeline=pipeline)
    assert one.decode_t0_s / two.decode_t0_s == weights
    assert one.decode_t2_s_per_token / two.decode_t2_s_per_token == batch
    assert one.prefill_b_s_per_token / two.prefill_b_s_per_token == 2


# What is kept and made.


def plan_and_pool(a_cluster):
    rendering = plan_of(a_cluster, ClusterNames(), [], images=Images(), credentials=SECRETS)
    names = [pool.name for pool in rendering.engine_pools]
    desired = desired_cluster(rendering, Identity("u"), {name: Identity(f"uid-{name}") for name in names})
    return rendering, desired.pool("q-prefill")


def test_leader_and_worker_are_made_from_one_revision_as_they_are_rendered():
    rendering, pool = plan_and_pool(cluster())
    owner = owner_reference(
        {"apiVersion": "v", "kind": "K", "metadata": {"name": "q-prefill", "uid": pool.uid}}
    )
    kept = controller_revision(rendering, pool, 1, owner)
    assert (observed_revision(kept).size, observed_revision(kept).gpus) == (2, 16)
    rendered = pods_of(cluster())
    for rank, name in enumerate(("q-prefill-p-7", "q-prefill-p-7-w1")):
        action = CreatePod(name, pool.name, "q-prefill-p-7", rank, pool.revision, "uid-of-leader")
        pod = pod_of(kept, action, owner)
        assert (pod["metadata"]["name"], pod["spec"]["hostname"]) == (name, name)
        twin = rendered[name.replace("-7", "-0")]
        renamed = str(pod["spec"]["containers"]).replace("q-prefill-p-7", "q-prefill-p-0")
        assert renamed == str(twin["spec"]["containers"])
        read = observed_pod({**pod, "metadata": {**pod["metadata"], "uid": "u"}})
        assert (read.instance, read.rank, read.size, read.gpus) == ("q-prefill-p-7", rank, 2, 8)
        assert read.leader_uid == ("uid-of-leader" if rank else "")
        assert bool(pod["spec"].get("readinessGates")) is (rank == 0)


def test_another_size_is_another_revision():
    one = {**PREFILL, "instance": {"size": 1, "parallelism": {"tensor": 8}}}
    assert plan_and_pool(cluster())[1].revision != plan_and_pool(cluster(prefill=one))[1].revision


# How workers wait with their end.


def hook_of(a_cluster, names):
    engine = engine_of(pods_of(a_cluster, names)["q-prefill-p-0-w1"])
    python, switch, program = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert (python, switch) == ("python", "-c")
    return [sys.executable, switch, program]


class Leader(http.server.BaseHTTPRequestHandler):
    emptied = threading.Event()
    asked = threading.Event()

    def do_POST(self):
        assert self.path == "/drain"
        self.asked.set()
        self.emptied.wait(20)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def local_names(a_cluster, leader_port):
    bases = {pod: 40_000 + 10 * n for n, pod in enumerate(pod_names(a_cluster))}
    return LocalNames({**bases, "q-prefill-p-0": leader_port})


def test_a_worker_whose_node_is_drained_has_its_leader_emptied_before_it_ends():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Leader)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    a_cluster = cluster()
    # The sidecar is at +3 of the leader's block.
    hook = subprocess.Popen(hook_of(a_cluster, local_names(a_cluster, server.server_port - 3)))
    assert Leader.asked.wait(20)
    assert hook.poll() is None, "work is in flight"
    Leader.emptied.set()
    assert hook.wait(20) == 0
    server.shutdown()
    server.server_close()


def test_without_a_sidecar_a_worker_ends_after_its_leader():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Leader)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    a_cluster = cluster(redis=False)
    hook = subprocess.Popen(hook_of(a_cluster, local_names(a_cluster, server.server_port)))
    time.sleep(1)
    assert hook.poll() is None
    server.shutdown()
    server.server_close()
    assert hook.wait(20) == 0


@pytest.mark.parametrize("redis", [True, False])
def test_a_worker_whose_leader_is_gone_ends_at_once_and_without_complaint(redis):
    a_cluster = cluster(redis=redis)
    done = subprocess.run(
        hook_of(a_cluster, local_names(a_cluster, 9)), capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_budget_comes_with_the_first_ready_pod_and_stays():
    world = render(cluster(), ClusterNames(), credentials=SECRETS)
    pods = [{**pod, "status": {"conditions": [{"type": "Ready", "status": "False"}]}} for pod in world.pods]
    wanted = world.disruption_budgets
    assert "q-prefill" in {budget["metadata"]["name"] for budget in wanted}

    def names(there=()):
        return {b["metadata"]["name"] for b in with_something_to_protect(wanted, pods, there)}

    assert names() == set()
    assert names({"q-prefill"}) == {"q-prefill"}
    first = next(pod for pod in pods if pod["metadata"]["name"] == "q-prefill-p-0")
    first["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert names() == {"q-prefill"}


def test_a_service_stays_while_a_worker_ends_or_an_engine_has_no_sidecar():
    services = [{"metadata": {"name": name}} for name in ("q-prefill", "q-decode", "q-scheduler")]
    groups = render(cluster(), ClusterNames(), credentials=SECRETS).pods
    worker = [pod for pod in groups if pod["metadata"]["name"] == "q-prefill-p-0-w1"]
    leaders = [pod for pod in groups if pod["metadata"]["labels"].get("mooncake.io/rank") == "0"]
    assert leaders
    assert still_looked_up(services, leaders) == []
    assert [one["metadata"]["name"] for one in still_looked_up(services, worker)] == ["q-prefill"]
    alone = cluster(prefill={"name": "prefill"}, engine=SIMULATED, redis=False)
    static = render(alone, ClusterNames(), credentials=SECRETS).pods
    found = still_looked_up(services, static)
    assert [one["metadata"]["name"] for one in found] == ["q-prefill", "q-decode"]
