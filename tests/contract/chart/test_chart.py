"""The chart, as helm renders it, and what the operator makes of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_operator.planning.manifests.network import OPERATOR
from mooncake_operator.settings import Settings
from mooncake_testing.audit import Right, granted
from mooncake_testing.helm import CHART, NAMESPACE, RefusedError, helm, is_hook, render, render_all

ROOT = Path(__file__).resolve().parents[3]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def installed(values: dict[str, Any] | None = None, release: str = "mooncake") -> list[dict[str, Any]]:
    return [obj for obj in render(values, release) if not is_hook(obj)]


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def settings(objects: list[dict[str, Any]]) -> Settings:
    """What the operator reads out of its environment; fails where it does not know a variable."""
    return Settings.from_environment({v["name"]: v["value"] for v in container(objects)["env"]})


def test_helm_finds_nothing_to_mend() -> None:
    said = helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in said
    assert "WARNING" not in said


def test_the_definitions_are_those_of_the_models_and_stay_when_the_chart_goes() -> None:
    rendered = [obj for obj in render_all() if obj["kind"] == "CustomResourceDefinition"]
    for definition in rendered:
        assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    generated = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "crds").glob("*.yaml"))]
    assert sorted(rendered, key=lambda d: d["metadata"]["name"]) == generated


def test_definitions_can_be_left_to_somebody_else() -> None:
    assert render({"crds": {"install": False}}) == render_all({"crds": {"install": False}})


def test_chart_images_and_wheel_have_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert container(installed())["image"] == f"mooncake-k8s-operator:{version}"


def test_without_values_the_operator_is_set_up_as_by_its_own_defaults() -> None:
    names = {"lease_namespace": NAMESPACE, "lease_name": "mooncake-operator"}
    assert settings(installed()) == Settings(**names)


def test_values_reach_the_operator() -> None:
    given = {
        "operator": {"workers": 8, "resyncSeconds": 60, "logLevel": "DEBUG", "watchNamespaces": ["a", "b"]},
        "images": {"mooncake": "example/mooncake:1", "redis": "example/redis:8", "redisUser": 1000650000},
    }
    read = settings(installed(given))
    assert (read.workers, read.resync_seconds, read.log_level) == (8, 60, "DEBUG")
    assert (read.images.mooncake, read.images.redis) == ("example/mooncake:1", "example/redis:8")
    assert read.images.redis_user == 1000650000
    assert (read.namespaces, read.scan) == (("a", "b"), False)


def test_network_policies_of_clusters_let_the_operator_in() -> None:
    labels = one(installed(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert OPERATOR.items() <= labels.items()


def test_a_users_labels_do_not_replace_those_that_select() -> None:
    values = {"operator": {"podLabels": {"team": "a", "app.kubernetes.io/component": "other"}}}
    deployment = one(installed(values), "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert labels["team"] == "a"


def test_probes_and_metrics_ask_at_the_ports_that_the_operator_opens() -> None:
    objects = installed()
    ports = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
    assert ports == {"metrics": Settings().metrics_port, "health": Settings().health_port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(objects)[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    (served,) = one(objects, "Service")["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (Settings().metrics_port, "metrics")


def test_where_the_operator_looks_after_some_namespaces_it_may_only_let_pools_go_in_others() -> None:
    watched = {"operator": {"watchNamespaces": ["a", "b"]}}
    objects = installed({**watched, "rbac": {"aggregateToUserRoles": False}})
    everywhere = granted([one(objects, "ClusterRole")])
    pools = {
        Right("mooncake.io", f"mooncake{role}pools", verb)
        for role in ("prefill", "decode")
        for verb in ("get", "list", "patch")
    }
    assert everywhere == {*pools, Right("", "namespaces", "get")}
    roles = {obj["metadata"]["namespace"] for obj in objects if obj["kind"] == "Role"}
    assert roles == {"a", "b", NAMESPACE}


def test_the_operators_roles_name_all_that_they_allow() -> None:
    for role in (obj for obj in render() if obj["kind"] in ("ClusterRole", "Role")):
        for rule in role["rules"]:
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]), role["metadata"]


def test_two_replicas_are_not_evicted_together() -> None:
    assert not [obj for obj in installed() if obj["kind"] == "PodDisruptionBudget"]
    objects = installed({"operator": {"replicas": 2}})
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == one(objects, "Deployment")["spec"]["selector"]


def test_a_second_release_has_names_of_its_own() -> None:
    def names(release: str) -> set[tuple[str, str, str]]:
        return {
            (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"])
            for o in render(release=release)
        }

    assert not names("mooncake") & names("other")
    assert settings(installed(release="other")).lease_name == "other-mooncake-operator"


LONGEST_RELEASE = "a-release-whose-name-is-as-long-as-helm-takes-them-so"


@pytest.mark.parametrize("release", ["a.team", LONGEST_RELEASE, f"{LONGEST_RELEASE[:49]}.abc"])
def test_names_are_what_the_api_server_takes_whatever_the_release_is_called(release: str) -> None:
    label = "[a-z]([-a-z0-9]*[a-z0-9])?"
    for obj in render(release=release):
        name = obj["metadata"]["name"]
        assert re.fullmatch(label if obj["kind"] == "Service" else rf"{label}(\.{label})*", name)
        # The names of roles and the like may be longer.
        assert len(name) <= 63 or obj["kind"] not in ("Service", "Deployment", "Job", "ServiceAccount")


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("prod", "prod-mooncake-operator"),
        ("a.team", "a.team-mooncake-operator"),
        (LONGEST_RELEASE[:38], f"{LONGEST_RELEASE[:38]}-mooncake-operator"),
        (LONGEST_RELEASE, f"{LONGEST_RELEASE[:50]}-operator"),
    ],
)
def test_an_upgrade_finds_the_deployment_and_the_lease_of_the_version_before(release: str, name: str) -> None:
    """Under another name there would be a second operator, which does not wait for the first one's Lease."""
    objects = installed(release=release)
    assert one(objects, "Deployment")["metadata"]["name"] == name
    assert settings(objects).lease_name == name


@pytest.mark.parametrize("user", ["", None])
def test_who_runs_redis_can_be_left_to_the_platform(user: str | None) -> None:
    assert settings(installed({"images": {"redisUser": user}})).images.redis_user is None
    assert settings(installed()).images.redis_user == 65532


def test_an_account_of_the_users_own_is_bound_and_not_made() -> None:
    objects = installed({"serviceAccount": {"create": False, "name": "theirs"}})
    assert not [obj for obj in objects if obj["kind"] == "ServiceAccount"]
    subjects = [s["name"] for o in objects if o["kind"].endswith("Binding") for s in o["subjects"]]
    assert set(subjects) == {"theirs"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"operator": {"replica": 2}}, "replica"),
        ({"operator": {"replicas": "two"}}, "/operator/replicas"),
        ({"operator": {"logLevel": "LOUD"}}, "/operator/logLevel"),
        ({"operator": {"watchNamespaces": ["Not_a_name"]}}, "/operator/watchNamespaces/0"),
        ({"operators": {}}, "operators"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
        # How Helm's users take a default away: where there must be something, it is not rendered as nothing.
        ({"images": {"redis": None}}, "redis"),
        ({"operator": {"workers": None}}, "workers"),
        ({"operator": {"image": None}}, "image"),
        ({"imagePullSecrets": [{}]}, "name"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        render(values)


def test_every_value_is_described_by_the_schema_and_has_a_default() -> None:
    given = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], described: dict[str, Any], where: str) -> None:
        names = set(described["properties"]) - {"global"}
        assert set(values) == names, where
        for name in names:
            if "properties" in described["properties"][name]:
                compare(values[name], described["properties"][name], f"{where}.{name}")

    compare(given, schema, "values")
