import re
from itertools import pairwise

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_core.api import MooncakeCluster, load_manifests, parse_object
from mooncake_core.api.managed import VOLUMES, is_managed_env
from mooncake_core.config import SchedulerConfig
from mooncake_operator.planning import (
    BLOCK_PORTS,
    ClusterNames,
    Credentials,
    LocalNames,
    pod_names,
    render,
)
from mooncake_testing.clusters import cluster_manifests

REVISION = "mooncake.io/revision"
SECRETS = Credentials(redis_password="s3cret", admin_token="t0ken")
quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def cluster_of(manifest):
    cluster = parse_object(manifest)
    assert isinstance(cluster, MooncakeCluster)
    return cluster


def local_names(cluster, first=20_000):
    bases = {pod: first + BLOCK_PORTS * position for position, pod in enumerate(pod_names(cluster))}
    return LocalNames(bases)


def worlds(cluster):
    for names in (ClusterNames(), local_names(cluster)):
        yield render(cluster, names, credentials=SECRETS)


def pod_specs(world):
    for pod in (*world.pods, *world.scheduler_pods):
        yield pod["metadata"]["name"], pod["spec"]
    for deployment in world.deployments:
        yield deployment["metadata"]["name"], deployment["spec"]["template"]["spec"]


@quick
@given(cluster_manifests())
def test_a_cluster_survives_the_way_to_yaml_and_back(manifest):
    cluster = cluster_of(manifest)
    (again,) = load_manifests(yaml.safe_dump(cluster.manifest()))
    assert again == cluster


@quick
@given(cluster_manifests())
def test_rendering_twice_gives_the_same_world(manifest):
    cluster = cluster_of(manifest)
    assert list(worlds(cluster)) == list(worlds(cluster_of(manifest)))


@quick
@given(cluster_manifests())
def test_no_two_objects_of_a_kind_share_a_name(manifest):
    for world in worlds(cluster_of(manifest)):
        objects = [*world.for_kubernetes(), *world.scheduler_pods]
        names = [(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]) for item in objects]
        assert len(names) == len(set(names))


@quick
@given(cluster_manifests())
def test_names_fit_into_dns_labels(manifest):
    for world in worlds(cluster_of(manifest)):
        for item in world.for_kubernetes():
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", item["metadata"]["name"])


@quick
@given(cluster_manifests())
def test_on_one_machine_every_port_is_listened_on_once(manifest):
    cluster = cluster_of(manifest)
    names = local_names(cluster)
    world = render(cluster, names, credentials=SECRETS)
    ports = [
        port["containerPort"]
        for pod in (*world.pods, *world.scheduler_pods)
        for container in pod["spec"]["containers"]
        for port in container["ports"]
        if port["name"] != "serving"
    ]
    assert len(ports) == len(set(ports))
    assert names.serving_port not in ports


@quick
@given(cluster_manifests(), st.integers(1, 9))
def test_the_number_of_replicas_is_not_part_of_the_revision(manifest, replicas):
    def revisions(document):
        world = render(cluster_of(document), ClusterNames(), credentials=SECRETS)
        return {
            (
                pod["metadata"]["labels"].get("mooncake.io/pool"),
                pod["metadata"]["labels"].get("mooncake.io/role"),
            ): pod["metadata"]["labels"].get("mooncake.io/revision")
            for pod in world.pods
        }

    scaled = {**manifest, "spec": dict(manifest["spec"])}
    for field in ("prefillPools", "decodePools", "kvCachePools"):
        scaled["spec"][field] = [{**pool, "replicas": replicas} for pool in manifest["spec"].get(field, [])]
    assert revisions(scaled) == revisions(manifest)


@quick
@given(cluster_manifests())
def test_both_runtimes_run_the_same_revision(manifest):
    on_cluster, on_machine = worlds(cluster_of(manifest))

    def revisions(world):
        return {
            p["metadata"]["name"]: p["metadata"]["labels"].get("mooncake.io/revision") for p in world.pods
        }

    assert revisions(on_cluster) == revisions(on_machine)


@quick
@given(cluster_manifests())
def test_every_variable_that_is_named_was_set_before(manifest):
    for world in worlds(cluster_of(manifest)):
        for pod, spec in pod_specs(world):
            for container in spec["containers"]:
                known = set()
                for variable in container["env"]:
                    named = set(re.findall(r"\$\((\w+)\)", variable.get("value", "")))
                    assert named <= known, (pod, variable["name"])
                    known.add(variable["name"])
                for word in (*container["command"], *container.get("args", [])):
                    assert set(re.findall(r"\$\((\w+)\)", word)) <= known, (pod, word)


@quick
@given(cluster_manifests())
def test_every_mount_has_its_volume_and_every_volume_its_source(manifest):
    for world in worlds(cluster_of(manifest)):
        held = {("configMap", item["metadata"]["name"]) for item in world.config_maps}
        held |= {("secret", item["metadata"]["name"]) for item in world.secrets}
        held |= {("secret", "keys"), ("secret", "redis")}
        for pod, spec in pod_specs(world):
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            assert len(volumes) == len(spec["volumes"]), pod
            for container in spec["containers"]:
                mounted = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
                assert len(mounted) == len(set(mounted))
                assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes.keys(), pod
            for volume in volumes.values():
                if "configMap" in volume:
                    assert ("configMap", volume["configMap"]["name"]) in held
                if "secret" in volume:
                    assert ("secret", volume["secret"]["secretName"]) in held


@quick
@given(cluster_manifests())
def test_folder_variables_are_mount_paths_so_that_a_runtime_can_choose_the_folder(manifest):
    for world in worlds(cluster_of(manifest)):
        for pod, spec in pod_specs(world):
            for container in spec["containers"]:
                mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
                for variable in container["env"]:
                    if variable["name"].endswith("_DIR"):
                        assert variable["value"] in mounted, (pod, variable["name"])


@quick
@given(cluster_manifests())
def test_what_the_product_sets_no_user_may_set(manifest):
    for world in worlds(cluster_of(manifest)):
        for _, spec in pod_specs(world):
            for container in spec["containers"]:
                own = {v["name"] for v in container["env"]} - {"HTTP_PROXY", "NCCL_DEBUG", "TZ"}
                assert all(is_managed_env(name) for name in own)


@quick
@given(cluster_manifests())
def test_services_select_pods_and_their_ports_exist(manifest):
    cluster = cluster_of(manifest)
    world = render(cluster, ClusterNames(), credentials=SECRETS)
    for service in world.services:
        wanted = service["spec"]["selector"].items()
        chosen = [
            pod for pod in (*world.pods, *world.scheduler_pods) if wanted <= pod["metadata"]["labels"].items()
        ]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            names = {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@quick
@given(cluster_manifests())
def test_the_scheduler_accepts_its_configuration(manifest):
    for world in worlds(cluster_of(manifest)):
        for config_map in world.config_maps:
            if text := config_map["data"].get("scheduler.json"):
                SchedulerConfig.model_validate_json(text)


@quick
@given(cluster_manifests())
def test_port_blocks_are_kept_to(manifest):
    cluster = cluster_of(manifest)
    names = local_names(cluster)
    world = render(cluster, names, credentials=SECRETS)
    bases = sorted(names.bases.values())
    assert all(second - first >= BLOCK_PORTS for first, second in pairwise(bases))
    for pod in (*world.pods, *world.scheduler_pods):
        base = names.bases[pod["metadata"]["name"]]
        for container in pod["spec"]["containers"]:
            for port in container["ports"]:
                offset = port["containerPort"] - base
                assert port["name"] == "serving" or 0 <= offset < BLOCK_PORTS


@quick
@given(cluster_manifests())
def test_volumes_and_folders_of_the_product_are_the_ones_that_users_may_not_take(manifest):
    for world in worlds(cluster_of(manifest)):
        for _, spec in pod_specs(world):
            assert {volume["name"] for volume in spec["volumes"]} - {"scratch"} <= VOLUMES
