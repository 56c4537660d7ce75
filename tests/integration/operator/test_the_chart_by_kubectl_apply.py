"""`helm template --no-hooks | kubectl apply --server-side`, as docs/kubernetes.md has it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_testing.apiserver import ApiServer, ProgramsMissingError, an_api_server, find_program
from mooncake_testing.helm import CHART, NAMESPACE, helm
from mooncake_testing.operator_process import OperatorProcess
from mooncake_testing.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
SETTING = "MOONCAKE_OPERATOR_"


class Installation:
    """A chart's manifests, and the API server that they are applied to."""

    def __init__(self, server: ApiServer, *sets: str) -> None:
        self.server = server
        given = [word for value in sets for word in ("--set", value)]
        self.text = helm("template", "mooncake", str(CHART), f"--namespace={NAMESPACE}", "--no-hooks", *given)
        self.objects = [obj for obj in yaml.safe_load_all(self.text) if obj is not None]

    def apply(self) -> list[str]:
        """What kubectl says of each object; nothing else may be said."""
        try:
            kubectl = find_program("kubectl")
        except ProgramsMissingError as error:
            pytest.skip(str(error))
        command = [str(kubectl), f"--kubeconfig={self.server.kubeconfig}"]
        command += ["apply", "--server-side", "--validate=strict", "-f", "-"]
        ran = subprocess.run(command, input=self.text, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        return ran.stdout.splitlines()

    def versions(self) -> dict[str, str]:
        """The versions of all objects, by which a write would be seen."""
        return {self._path(obj): self.live(obj)["metadata"]["resourceVersion"] for obj in self.objects}

    def live(self, obj: dict[str, Any]) -> Any:
        return self.server.request("GET", self._path(obj))

    def find(self, kind: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = [obj for obj in self.objects if obj["kind"] == kind]
        return found[0]

    @staticmethod
    def _path(obj: dict[str, Any]) -> str:
        root = "/apis" if "/" in obj["apiVersion"] else "/api"
        namespace = obj["metadata"].get("namespace")
        within = f"/namespaces/{namespace}" if namespace else ""
        kind = obj["kind"].lower()
        plural = kind + ("es" if kind.endswith("s") else "s") if not kind.endswith("y") else kind[:-1] + "ies"
        return f"{root}/{obj['apiVersion']}{within}/{plural}/{obj['metadata']['name']}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with an_api_server(tmp_path) as server:
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
        server.request("POST", "/api/v1/namespaces", namespace)
        remove_definitions(server)
        yield server


def remove_definitions(server: ApiServer) -> None:
    """Those that tests find installed; here the chart brings its own."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

    def names() -> list[str]:
        return [item["metadata"]["name"] for item in server.request("GET", path)["items"]]

    for name in names():
        server.request("DELETE", f"{path}/{name}")
    eventually(lambda: not names(), "there is none")


def test_what_is_applied_is_taken_as_it_is_and_a_second_time_changes_nothing(server: ApiServer) -> None:
    installation = Installation(server)
    said = installation.apply()
    assert len(said) == len(installation.objects)
    assert {line.split()[-1] for line in said} == {"serverside-applied"}
    before = installation.versions()
    installation.apply()
    assert installation.versions() == before


def test_an_operator_that_was_installed_so_does_its_work_with_the_rights_and_settings_applied(
    server: ApiServer, tmp_path: Path
) -> None:
    installation = Installation(server, "operator.workers=2")
    installation.apply()
    template = installation.find("Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": template["spec"]}
    # The namespace takes Pods of the level `restricted` only.
    server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)

    account = installation.find("ServiceAccount")["metadata"]["name"]
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = server.request("POST", path, request)["status"]["token"]
    (container,) = template["spec"]["containers"]
    settings = {v["name"].removeprefix(SETTING).lower(): v["value"] for v in container["env"]}
    operator = OperatorProcess(server.write_kubeconfig("operator", token), tmp_path / "operator", **settings)
    try:
        manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
        manifest["metadata"]["namespace"] = "default"
        clusters = "/apis/mooncake.io/v1alpha1/namespaces/default/mooncakeclusters"
        server.request("POST", clusters, manifest)
        wanted = "app.kubernetes.io/managed-by=mooncake-operator"
        pods = f"/api/v1/namespaces/default/pods?labelSelector={wanted}"
        eventually(lambda: server.request("GET", pods)["items"], "there are Pods", 90)
        eventually(
            lambda: server.request("GET", f"{clusters}/{manifest['metadata']['name']}").get("status"),
            "there is a status",
            90,
        )
        refused = [line for line in operator.lines() if "forbidden" in str(line).lower()]
        assert refused == []
    finally:
        operator.kill()


def test_an_operator_of_some_namespaces_is_applied_too(server: ApiServer) -> None:
    for name in ("a", "b"):
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        server.request("POST", "/api/v1/namespaces", namespace)
    installation = Installation(server, "operator.watchNamespaces={a,b}", "operator.replicas=2")
    assert len(installation.apply()) == len(installation.objects)
    roles = [obj for obj in installation.objects if obj["kind"] == "Role"]
    assert {"a", "b"} <= {role["metadata"]["namespace"] for role in roles}
