"""A revision changes with what a user says of Pods, and with nothing else."""

from __future__ import annotations

import copy
import json

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mooncake_core.api import ManifestError, MooncakeCluster, parse_object
from mooncake_operator.planning import ClusterNames, Credentials, Images, render
from mooncake_testing.clusters import cluster_manifests

ENTRIES = ("prefillPools", "decodePools", "kvCachePools")
SECRETS = Credentials(redis_password="s3cret", admin_token="t0ken")
thorough = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def rendered(manifest, images=None):
    """First Pods of all that is planned as a pool: revision, and all else, by name."""
    cluster = parse_object(manifest)
    assert isinstance(cluster, MooncakeCluster)
    world = render(cluster, ClusterNames(), images=images or Images(), credentials=SECRETS)
    found = {}
    for pod in world.pods:
        pod = copy.deepcopy(pod)
        name, own = pod["metadata"]["name"], pod["metadata"]["labels"]
        # The managed Redis is cheap to replace, and follows its operator.
        if own["mooncake.io/role"] != "redis" and name.endswith("-0"):
            revision = own.pop("mooncake.io/revision")
            own.pop("mooncake.io/pairing", None)
            found[name] = (revision, json.dumps(pod, sort_keys=True))
    return found


@st.composite
def edited(draw):
    """A cluster, and the same with some of it as another cluster has it."""
    one, other = draw(cluster_manifests()), draw(cluster_manifests())
    two = copy.deepcopy(one)
    part_names = st.sampled_from(["model", "engine", "slo", "scheduler", "store", "entry"])
    parts = draw(st.lists(part_names, min_size=1))
    for part in parts:
        if part == "store":
            two["spec"] |= {"kvCachePools": other["spec"].get("kvCachePools", [])}
            continue
        if part != "entry":
            two["spec"][part] = other["spec"][part]
            continue
        field = draw(st.sampled_from([f for f in ENTRIES if two["spec"].get(f) and other["spec"].get(f)]))
        entry = draw(st.sampled_from(two["spec"][field]))
        entry.update({k: v for k, v in other["spec"][field][0].items() if k != "name"})
    return one, two


@thorough
@given(edited())
def test_pods_that_a_user_wants_otherwise_are_of_another_revision(manifests):
    try:
        before, after = map(rendered, manifests)
    except (ManifestError, ValueError):
        assume(False)
    for name in before.keys() & after.keys():
        (revision, pod), (next_revision, next_pod) = before[name], after[name]
        assert pod == next_pod or revision != next_revision


@thorough
@given(cluster_manifests(), st.integers(1, 5))
def test_how_many_there_are_and_how_they_are_replaced_is_no_part_of_a_revision(manifest, number):
    changed = copy.deepcopy(manifest)
    for field in ("prefillPools", "decodePools"):
        for entry in changed["spec"][field]:
            entry |= {"replicas": number, "update": {"maxSurge": 3}, "disruption": {"minAvailable": 1}}
    for entry in changed["spec"].get("kvCachePools", ()):
        entry["replicas"] = number
    changed["spec"]["coordination"] = {"rollout": {"maxSkew": "50%"}}
    changed["spec"]["slo"] = {"ttft": {"target": "1s"}, "tbt": {"target": "1s"}}
    before, after = rendered(manifest), rendered(changed)
    assert {name: revision for name, (revision, _) in after.items() if name in before} == {
        name: revision for name, (revision, _) in before.items()
    }


@thorough
@given(cluster_manifests(), cluster_manifests())
def test_templates_of_schedulers_and_redis_are_no_affair_of_engines_and_stores(manifest, other):
    scheduler = manifest["spec"]["scheduler"]
    template = other["spec"]["scheduler"].get("podTemplate", {"spec": {"priorityClassName": "serving"}})
    changed = copy.deepcopy(manifest)
    changed["spec"]["scheduler"]["podTemplate"] = template
    if "managed" in scheduler.get("redis", {}):
        tolerant = {"spec": {"tolerations": [{"key": "cpu"}]}}
        changed["spec"]["scheduler"]["redis"] = {"managed": {"podTemplate": tolerant}}
    assert rendered(changed) == rendered(manifest)


@thorough
@given(cluster_manifests())
def test_another_operator_wants_the_same_revisions(manifest):
    later = Images(mooncake="mooncake-k8s:99.0.0", redis="redis:99")
    before, after = rendered(manifest), rendered(manifest, later)
    assert {name: revision for name, (revision, _) in after.items()} == {
        name: revision for name, (revision, _) in before.items()
    }


def test_the_same_amount_in_another_notation_is_the_same_revision():
    manifest = {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": "q"},
        "spec": {
            "model": {"name": "m"},
            "engine": {"type": "Simulated", "simulated": {"profile": "llama3-70b-8xa800"}},
            "prefillPools": [{"name": "p", "replicas": 1, "resources": {"memory": "1Ti"}}],
            "decodePools": [{"name": "d", "replicas": 1}],
            "kvCachePools": [{"name": "kv", "replicas": 1, "segmentSize": "2Ti"}],
        },
    }
    written = copy.deepcopy(manifest)
    written["spec"]["prefillPools"][0]["resources"]["memory"] = "1024Gi"
    master = {"eviction": {"ratio": "0.050"}}
    written["spec"]["kvCachePools"][0] |= {"segmentSize": "2048.0Gi", "master": master}
    other = copy.deepcopy(manifest)
    other["spec"]["prefillPools"][0]["resources"]["memory"] = "1023Gi"
    made = map(rendered, (manifest, written, other))
    revisions = [{name: revision for name, (revision, _) in pods.items()} for pods in made]
    assert revisions[0] == revisions[1] != revisions[2]
