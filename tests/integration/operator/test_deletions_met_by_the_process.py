"""Definitions and namespaces that are deleted under a running operator, or while none runs."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_testing.apiserver import ApiServer, an_api_server, find_program
from mooncake_testing.operator_process import OperatorProcess
from mooncake_testing.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(900, func_only=True)
DELETED_WITHIN_S = 300.0
"""The API server deletes a definition's objects first and looks every few seconds: half a minute if idle."""
APPLY = "application/apply-patch+yaml"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of this module's own.

    A definition goes once all its objects have, in every namespace: what other tests left, with finalizers
    that no operator takes off any more, would hold it for ever. And theirs must not go.
    """
    with an_api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


class Place:
    """One namespace, by way of plain requests."""

    def __init__(self, server: ApiServer, namespace: str, directory: Path) -> None:
        self.server = server
        self.namespace = namespace
        self._directory = directory
        self._operators: list[OperatorProcess] = []
        self.custom = f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}"

    def start_operator(self) -> OperatorProcess:
        started = OperatorProcess(
            self.server.kubeconfig,
            self._directory / f"operator-{len(self._operators)}",
            namespaces=self.namespace,
            lease_namespace="default",
            lease_name=self.namespace,
            lease_duration_seconds=15,
            resync_seconds=3,
            backoff_max_seconds=2,
        )
        self._operators.append(started)
        eventually(lambda: started.leads, "it leads", 120)
        return started

    def stop(self) -> None:
        for operator in self._operators:
            operator.kill()

    def apply(self) -> None:
        manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
        manifest["metadata"] = {"name": "q", "namespace": self.namespace}
        path = f"{self.custom}/mooncakeclusters/q?fieldManager=kubectl&force=true"
        self.server.request("PATCH", path, manifest, APPLY)

    def get(self, path: str) -> Any:
        try:
            return self.server.request("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def pods(self, pool: str) -> list[str]:
        listed = self.server.request("GET", f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return [
            pod["metadata"]["name"]
            for pod in listed
            if pod["metadata"].get("labels", {}).get("mooncake.io/pool") == pool
        ]

    def finalizers(self, plural: str, name: str) -> list[str]:
        found = self.get(f"{self.custom}/{plural}/{name}")
        return (found or {}).get("metadata", {}).get("finalizers", [])

    def ready(self) -> Any:
        cluster = self.get(f"{self.custom}/mooncakeclusters/q") or {}
        conditions = cluster.get("status", {}).get("conditions", ())
        return next((c for c in conditions if c["type"] == "Ready"), {})


@pytest.fixture
def place(api_server: ApiServer, namespace: str, tmp_path: Path) -> Iterator[Place]:
    made = Place(api_server, namespace, tmp_path)
    yield made
    made.stop()


@pytest.fixture
def definition(request: pytest.FixtureRequest, api_server: ApiServer) -> Iterator[str]:
    """A definition that the test may delete; it is there again afterwards."""
    let_go_of_all_pools(api_server)
    plural: str = request.param
    name = f"{plural}.mooncake.io"
    yield name
    # Half deleted, it would be applied and go nevertheless.
    let_go_of_all_pools(api_server)
    eventually(lambda: not is_ending(api_server, name), f"{name} is there or gone", DELETED_WITHIN_S)
    restore(api_server, name)


def let_go_of_all_pools(server: ApiServer) -> None:
    """Take off the finalizers of tests whose operator is gone."""
    for plural in ("mooncakeprefillpools", "mooncakedecodepools"):
        path = f"/apis/mooncake.io/v1alpha1/{plural}"
        try:
            left = server.request("GET", path)["items"]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                continue  # its definition is gone
            raise
        for pool in left:
            metadata = pool["metadata"]
            one = f"/apis/mooncake.io/v1alpha1/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"
            with contextlib.suppress(urllib.error.HTTPError):
                free = {"metadata": {"finalizers": None}}
                server.request("PATCH", one, free, "application/merge-patch+json")


def is_ending(server: ApiServer, name: str) -> bool:
    try:
        return "deletionTimestamp" in server.request("GET", f"{DEFINITIONS}/{name}")["metadata"]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise


def restore(server: ApiServer, name: str) -> None:
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        manifest = yaml.safe_load(file.read_text())
        if manifest["metadata"]["name"] == name:
            path = f"{DEFINITIONS}/{name}?fieldManager=test&force=true"
            server.request("PATCH", path, manifest, APPLY)
    eventually(lambda: is_served(server, name), f"{name} is served")


def is_served(server: ApiServer, name: str) -> bool:
    try:
        server.request("GET", f"/apis/mooncake.io/v1alpha1/{name.split('.')[0]}")
    except urllib.error.HTTPError:
        return False
    return True


def delete_definition(place: Place, name: str) -> None:
    place.server.request("DELETE", f"{DEFINITIONS}/{name}")
    eventually(lambda: place.get(f"{DEFINITIONS}/{name}") is None, "the definition is gone", DELETED_WITHIN_S)


@pytest.mark.parametrize("definition", ["mooncakedecodepools"], indirect=True)
def test_a_definition_of_pools_that_is_deleted_and_comes_back_costs_those_pools_only(
    place: Place, definition: str
) -> None:
    operator = place.start_operator()
    place.apply()
    eventually(lambda: place.pods("q-decode") and place.pods("q-prefill"), "Pods of both pools")
    prefill = place.pods("q-prefill")
    delete_definition(place, definition)
    eventually(lambda: place.ready().get("reason") == "KindMissing", "the condition says what is missing")
    assert "install the CustomResourceDefinitions" in place.ready()["message"]
    before = operator.metric("mooncake_reconcile_total") or 0
    time.sleep(12)  # several resyncs, each of which misses a kind
    assert operator.process.poll() is None
    assert operator.health() == 200, "a missing kind is nothing that a restart would mend"
    assert (operator.metric("mooncake_reconcile_total") or 0) - before < 30, "nor is it asked for hotly"
    restore(place.server, definition)
    eventually(lambda: place.pods("q-decode"), "the pool and its Pods again", DELETED_WITHIN_S)
    assert place.pods("q-prefill") == prefill


@pytest.mark.parametrize("definition", ["mooncakeclusters"], indirect=True)
def test_when_the_definition_of_clusters_is_deleted_all_goes_and_a_new_one_is_acted_on(
    place: Place, definition: str
) -> None:
    operator = place.start_operator()
    place.apply()
    eventually(lambda: place.pods("q-decode"), "Pods")
    delete_definition(place, definition)
    eventually(
        lambda: place.get(f"{place.custom}/mooncakedecodepools/q-decode") is None,
        "its pools go",
        DELETED_WITHIN_S,
    )
    assert operator.process.poll() is None
    eventually(lambda: operator.health() == 200, "it is alive")
    restore(place.server, definition)
    place.apply()
    eventually(lambda: place.pods("q-decode"), "the new cluster's Pods", DELETED_WITHIN_S)


def test_a_namespace_that_was_deleted_while_no_operator_ran_ends_when_one_does(place: Place) -> None:
    first = place.start_operator()
    place.apply()
    eventually(lambda: place.pods("q-decode"), "Pods")
    eventually(lambda: place.finalizers("mooncakedecodepools", "q-decode"), "a finalizer")
    first.kill()
    path = f"/api/v1/namespaces/{place.namespace}"
    place.server.request("DELETE", path)
    decode = f"{place.custom}/mooncakedecodepools/q-decode"
    eventually(lambda: "deletionTimestamp" in (place.get(decode) or {}).get("metadata", {}), "it ends")
    place.start_operator()
    eventually(lambda: place.get(path) is None, "the namespace is gone", DELETED_WITHIN_S)


def test_what_the_documentation_says_to_type_lets_pools_go_when_there_is_no_operator_any_more(
    place: Place,
) -> None:
    text = (ROOT / "docs" / "deleting.md").read_text()
    (typed,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    first = place.start_operator()
    place.apply()
    eventually(lambda: place.finalizers("mooncakedecodepools", "q-decode"), "a finalizer")
    first.kill()
    path = f"/api/v1/namespaces/{place.namespace}"
    place.server.request("DELETE", path)
    decode = f"{place.custom}/mooncakedecodepools/q-decode"
    eventually(lambda: "deletionTimestamp" in (place.get(decode) or {}).get("metadata", {}), "it ends")
    folder = find_program("kubectl").parent
    environment = os.environ | {
        "KUBECONFIG": str(place.server.kubeconfig),
        "NAMESPACE": place.namespace,
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    subprocess.run(["bash", "-euo", "pipefail", "-c", typed], check=True, env=environment)
    eventually(lambda: place.get(path) is None, "the namespace is gone", DELETED_WITHIN_S)


def test_a_change_in_the_status_of_an_owned_object_alone_is_noticed(place: Place) -> None:
    place.start_operator()
    place.apply()
    path = f"/apis/apps/v1/namespaces/{place.namespace}/deployments/q-scheduler"
    eventually(lambda: place.get(path), "the Deployment")
    counts = {"replicas": 2, "readyReplicas": 2, "availableReplicas": 2, "updatedReplicas": 2}
    place.server.request("PATCH", f"{path}/status", {"status": counts}, "application/merge-patch+json")

    def scheduler_ready() -> bool:
        cluster = place.get(f"{place.custom}/mooncakeclusters/q")
        conditions = cluster.get("status", {}).get("conditions", ())
        return any(c["type"] == "SchedulerReady" and c["status"] == "True" for c in conditions)

    eventually(scheduler_ready, "the condition follows")
