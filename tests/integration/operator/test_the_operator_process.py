"""The whole operator as a process, against a real API server."""

from __future__ import annotations

import signal
import ssl
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from mooncake_testing.apiserver import ApiServer
from mooncake_testing.kube_proxy import KubeProxy
from mooncake_testing.operator_process import OperatorProcess
from mooncake_testing.waiting import eventually

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
APPLY = "application/apply-patch+yaml"


class Cluster:
    """A test's view of one cluster in its namespace."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.custom = f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}"

    def apply(self, name: str = "quickstart", **engine: Any) -> Any:
        manifest = yaml.safe_load(QUICKSTART.read_text())
        manifest["metadata"] = {"name": name, "namespace": self.namespace}
        manifest["spec"]["engine"]["simulated"] |= engine
        path = f"{self.custom}/mooncakeclusters/{name}?fieldManager=kubectl&force=true"
        return self.server.request("PATCH", path, manifest, APPLY)

    def get(self, path: str) -> Any:
        try:
            return self.server.request("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def deployment(self, name: str = "quickstart") -> Any:
        return self.get(f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}-scheduler")

    def pods(self) -> set[str]:
        found = self.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return {pod["metadata"]["name"] for pod in found}

    def time_scale(self, name: str = "quickstart") -> str:
        found = self.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{name}-scheduler")
        text: str = found["data"]["scheduler.json"] if found else ""
        return text


@pytest.fixture
def cluster(api_server: ApiServer, namespace: str) -> Cluster:
    return Cluster(api_server, namespace)


class Operators:
    """Operators of one test; none is left behind."""

    def __init__(self, kubeconfig: Path, namespace: str, directory: Path) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._directory = directory
        self.all: list[OperatorProcess] = []

    def start(self, kubeconfig: Path | None = None, **settings: Any) -> OperatorProcess:
        chosen: dict[str, Any] = {
            "namespaces": self._namespace,
            "lease_namespace": self._namespace,
            "lease_duration_seconds": 3,
            "identity": f"operator-{len(self.all)}",
            **settings,
        }
        directory = self._directory / f"operator-{len(self.all)}"
        started = OperatorProcess(kubeconfig or self._kubeconfig, directory, **chosen)
        self.all.append(started)
        return started


@pytest.fixture
def operators(api_server: ApiServer, namespace: str, tmp_path: Path) -> Iterator[Operators]:
    started = Operators(api_server.kubeconfig, namespace, tmp_path)
    yield started
    for operator in started.all:
        operator.kill()


def test_an_applied_cluster_is_acted_on_and_the_operator_tells_of_itself(
    cluster: Cluster, operators: Operators
) -> None:
    operator = operators.start()
    eventually(lambda: operator.leads, "it leads")
    cluster.apply()
    eventually(cluster.deployment, "the scheduler's Deployment")
    eventually(lambda: operator.health() == 200, "liveness")
    eventually(lambda: (operator.metric("mooncake_reconcile_total") or 0) >= 1, "passes are counted")
    assert operator.metric("mooncake_reconcile_errors_total") == 0
    assert (operator.metric("mooncake_kube_requests_total") or 0) > 0
    assert (operator.metric("mooncake_watch_last_event_timestamp_seconds") or 0) > 0
    assert operator.stop() == 0
    assert operator.said("the operator ends")[0]["why"] == "asked to"
    assert all({"event", "level", "timestamp"} <= line.keys() for line in operator.lines())


def test_a_second_operator_waits_and_takes_over_when_the_first_is_killed(
    cluster: Cluster, operators: Operators
) -> None:
    first = operators.start()
    eventually(lambda: first.leads, "the first leads")
    second = operators.start()
    eventually(lambda: second.said("lease: waiting"), "the second waits")
    eventually(lambda: second.health() == 200, "the second is alive while it waits")
    cluster.apply()
    eventually(cluster.deployment, "the first acts")
    assert second.metric("mooncake_reconcile_total") in (None, 0)
    first.kill()
    eventually(lambda: second.leads, "the second leads")
    cluster.apply(timeScale=20)
    eventually(lambda: '"time_scale": 20' in cluster.time_scale(), "the second acts")


class Witness:
    """What one operator writes: it reaches the API server through here only."""

    def __init__(self, server: ApiServer, name: str) -> None:
        certificate = server.directory / "apiserver" / "apiserver.crt"
        self._proxy = KubeProxy(server.url, ssl.create_default_context(cafile=str(certificate)))
        self._proxy.fault = self._see
        self.kubeconfig = server.write_kubeconfig(name, "tests-only", server=self._proxy.start())
        self.writes: list[tuple[str, str]] = []

    def _see(self, request: web.Request) -> None:
        if request.method != "GET" and "/leases" not in request.path:
            self.writes.append((request.method, request.path))

    def stop(self) -> None:
        self._proxy.stop()


def test_after_a_kill_in_the_middle_of_creating_the_second_completes_and_nothing_is_made_twice(
    cluster: Cluster, operators: Operators
) -> None:
    witnesses = [Witness(cluster.server, f"witness-{n}") for n in range(2)]
    try:
        first, second = (operators.start(witness.kubeconfig) for witness in witnesses)
        eventually(lambda: first.leads or second.leads, "one leads")
        if second.leads:
            first, second = second, first
            witnesses.reverse()
        eventually(lambda: second.said("lease: waiting"), "the other waits")
        pods = f"/api/v1/namespaces/{cluster.namespace}/pods"
        cluster.apply()
        eventually(lambda: ("POST", pods) in witnesses[0].writes, "the first makes a Pod")
        first.kill()
        assert witnesses[1].writes == []
        wanted = {f"quickstart-{pool}-{n}" for pool in ("prefill-p", "decode-d") for n in range(2)}
        eventually(lambda: wanted <= cluster.pods(), "the second makes the others")
        eventually(lambda: second.metric("mooncake_workqueue_depth") == 0, "it comes to rest")
        assert {name for name in cluster.pods() if "-p-" in name or "-d-" in name} == wanted
        # What was made once was not made again, for nothing was ever taken away.
        assert not any(method == "DELETE" for witness in witnesses for method, _ in witness.writes)
    finally:
        for operator in operators.all:
            operator.kill()
        for witness in witnesses:
            witness.stop()


def test_an_operator_that_stops_hands_the_lease_over_at_once(operators: Operators) -> None:
    first = operators.start(lease_duration_seconds=60)
    eventually(lambda: first.leads, "the first leads")
    second = operators.start(lease_duration_seconds=60)
    eventually(lambda: second.said("lease: waiting"), "the second waits")
    assert first.stop() == 0
    eventually(lambda: second.leads, "the second need not wait for the lease to run out", 15)


def test_an_operator_that_was_frozen_for_too_long_ends_instead_of_acting_beside_its_successor(
    operators: Operators,
) -> None:
    first = operators.start()
    eventually(lambda: first.leads, "the first leads")
    first.process.send_signal(signal.SIGSTOP)
    second = operators.start()
    eventually(lambda: second.leads, "the second leads")
    first.process.send_signal(signal.SIGCONT)
    assert first.wait(20) == 1
    assert first.said("the operator ends")[0]["error"] == "LeadershipLostError"
    assert second.leads


def test_what_changed_while_no_operator_ran_is_seen_by_the_next(
    cluster: Cluster, operators: Operators
) -> None:
    first = operators.start()
    cluster.apply()
    eventually(cluster.deployment, "the first acts")
    first.kill()
    cluster.apply(timeScale=20)
    path = f"/api/v1/namespaces/{cluster.namespace}/services/quickstart-scheduler"
    cluster.server.request("DELETE", path)
    operators.start(identity="operator-0")
    eventually(lambda: '"time_scale": 20' in cluster.time_scale(), "the edit")
    eventually(lambda: cluster.get(path), "the Service that somebody deleted")


def test_an_owned_object_that_is_deleted_comes_back(cluster: Cluster, operators: Operators) -> None:
    operators.start()
    cluster.apply()
    eventually(cluster.deployment, "the Deployment")
    path = f"/apis/apps/v1/namespaces/{cluster.namespace}/deployments/quickstart-scheduler"
    cluster.server.request("DELETE", path, {"propagationPolicy": "Background"})
    eventually(cluster.deployment, "the Deployment again")


def test_a_wrong_setting_is_named_and_nothing_starts(tmp_path: Path) -> None:
    operator = OperatorProcess(tmp_path / "none", tmp_path, workers=0, colour="blue")
    assert operator.wait() == 2
    text = operator.log.read_text()
    assert "MOONCAKE_OPERATOR_WORKERS: " in text
    assert "MOONCAKE_OPERATOR_COLOUR: no such setting" in text


def test_without_a_cluster_the_operator_says_what_to_set(tmp_path: Path) -> None:
    operator = OperatorProcess(tmp_path / "none", tmp_path)
    assert operator.wait() == 1
    assert "set KUBECONFIG" in operator.said("the operator ends")[0]["why"]


def test_a_cluster_that_cannot_come_up_is_looked_at_again_without_hurry(
    cluster: Cluster, operators: Operators
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/configmaps": "0"}}}
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    cluster.server.request("POST", path, quota)
    status = {"status": {"hard": {"count/configmaps": "0"}, "used": {"count/configmaps": "0"}}}
    cluster.server.request("PATCH", f"{path}/none/status", status, "application/merge-patch+json")
    operator = operators.start()
    cluster.apply()

    def ready() -> Any:
        found = cluster.get(f"{cluster.custom}/mooncakeclusters/quickstart")
        conditions = found.get("status", {}).get("conditions", ())
        return next((c for c in conditions if c["type"] == "Ready"), {})

    eventually(lambda: ready().get("reason") == "QuotaExceeded", "the quota is named")

    def stands_still() -> bool:
        before = operator.metric("mooncake_reconcile_total")
        time.sleep(5)
        return operator.metric("mooncake_reconcile_total") == before

    eventually(stands_still, "five seconds without a pass", 90)
    assert operator.metric("mooncake_reconcile_errors_total") == 0
    assert operator.metric("mooncake_kube_events_total")
