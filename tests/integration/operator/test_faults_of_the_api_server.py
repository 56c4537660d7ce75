"""Whatever happens between the operator and the API server, the world ends as it should."""

from __future__ import annotations

import random
import ssl
import threading
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


class Setting:
    """An operator that reaches a real API server by way of a proxy, and one namespace."""

    def __init__(self, server: ApiServer, namespace: str, directory: Path) -> None:
        self.server = server
        self.namespace = namespace
        context = ssl.create_default_context(cafile=str(server.directory / "apiserver" / "apiserver.crt"))
        self.proxy = KubeProxy(server.url, context)
        self._kubeconfig = server.write_kubeconfig("proxied", "tests-only", server=self.proxy.start())
        self._directory = directory
        self.operator: OperatorProcess | None = None

    def start_operator(self, **settings: Any) -> OperatorProcess:
        chosen: dict[str, Any] = {
            "namespaces": self.namespace,
            "lease_namespace": self.namespace,
            "resync_seconds": 300,
            "backoff_max_seconds": 5,
            **settings,
        }
        self.operator = OperatorProcess(self._kubeconfig, self._directory / "operator", **chosen)
        eventually(lambda: self.operator and self.operator.leads, "it leads")
        return self.operator

    def apply(self, time_scale: int) -> None:
        manifest = yaml.safe_load(QUICKSTART.read_text())
        manifest["metadata"] = {"name": "q", "namespace": self.namespace}
        manifest["spec"]["engine"]["simulated"]["timeScale"] = time_scale
        path = f"/apis/mooncake.io/v1alpha1/namespaces/{self.namespace}/mooncakeclusters/q"
        query = "?fieldManager=kubectl&force=true"
        self.server.request("PATCH", path + query, manifest, "application/apply-patch+yaml")

    def has(self, time_scale: int) -> bool:
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/q-scheduler"
        try:
            found = self.server.request("GET", path)
        except urllib.error.HTTPError:
            return False
        return f'"time_scale": {time_scale}' in found["data"]["scheduler.json"]

    def becomes(self, time_scale: int, seconds: float = 120) -> None:
        eventually(lambda: self.has(time_scale), f"time scale {time_scale}", seconds)


@pytest.fixture
def setting(api_server: ApiServer, namespace: str, tmp_path: Path) -> Iterator[Setting]:
    made = Setting(api_server, namespace, tmp_path)
    yield made
    if made.operator is not None:
        made.operator.kill()
    made.proxy.stop()


def watches(request: web.Request) -> bool:
    return request.query.get("watch") in ("true", "1")


@pytest.mark.parametrize("fault", ["gone", "gone-status", "error", "404", "500", "429", "drop"])
def test_watches_that_fail_begin_anew_and_nothing_is_missed(setting: Setting, fault: str) -> None:
    operator = setting.start_operator()
    setting.apply(10)
    setting.becomes(10)
    seen: set[str] = set()

    def once_for_each_kind(request: web.Request) -> str | None:
        if not watches(request) or request.path in seen:
            return None
        seen.add(request.path)
        return fault

    eventually(lambda: setting.proxy.watches >= 10, "all kinds are watched")
    setting.proxy.fault = once_for_each_kind
    setting.proxy.drop_watches()
    setting.apply(20)
    setting.becomes(20)
    eventually(lambda: setting.proxy.answers[fault] > 0, "the fault was met")
    setting.apply(30)
    setting.becomes(30)
    assert operator.process.poll() is None


def test_a_watch_that_stalls_is_noticed_and_replaced(setting: Setting) -> None:
    setting.start_operator(watch_inactivity_seconds=3)
    setting.apply(10)
    setting.becomes(10)
    setting.proxy.stall_watches()
    setting.apply(20)
    setting.becomes(20)


def test_events_that_are_lost_are_made_up_for_by_the_resync(setting: Setting) -> None:
    setting.start_operator(resync_seconds=4)
    setting.apply(10)
    setting.becomes(10)
    setting.proxy.lossy.set()
    setting.apply(20)
    setting.becomes(20)
    path = f"/api/v1/namespaces/{setting.namespace}/services/q-scheduler"
    setting.server.request("DELETE", path)

    def is_back() -> bool:
        try:
            return bool(setting.server.request("GET", path))
        except urllib.error.HTTPError:
            return False

    eventually(is_back, "the Service that was deleted unseen")


def test_requests_that_fail_at_random_only_delay(setting: Setting) -> None:
    chance = random.Random(7)

    def sometimes(request: web.Request) -> str | None:
        if chance.random() < 0.25:
            return chance.choice(["500", "429", "drop"])
        return None

    operator = setting.start_operator(lease_duration_seconds=30)
    setting.proxy.fault = sometimes
    setting.apply(10)
    setting.becomes(10, 90)
    setting.apply(20)
    setting.becomes(20, 90)
    assert operator.process.poll() is None


def test_an_api_server_that_is_killed_and_comes_back_finds_the_operator_at_work(setting: Setting) -> None:
    operator = setting.start_operator(lease_duration_seconds=60)
    setting.apply(10)
    setting.becomes(10)
    setting.server.kill()
    setting.server.start()
    setting.apply(20)
    setting.becomes(20, 60)
    assert operator.process.poll() is None


def test_an_etcd_that_halts_for_a_while_only_delays(setting: Setting) -> None:
    operator = setting.start_operator(lease_duration_seconds=60)
    setting.apply(10)
    setting.becomes(10)
    with setting.server.without_etcd():
        # Longer than a request may take, shorter than the Lease lasts.
        time.sleep(12)
        assert operator.health() == 200
    setting.apply(20)
    setting.becomes(20, 60)
    assert operator.process.poll() is None


def test_an_etcd_that_is_slow_only_delays(setting: Setting) -> None:
    operator = setting.start_operator(lease_duration_seconds=60)
    setting.apply(10)
    setting.becomes(10)
    over = threading.Event()

    def halting() -> None:
        while not over.is_set():
            with setting.server.without_etcd():
                time.sleep(0.7)

    slow = threading.Thread(target=halting)
    slow.start()
    try:
        setting.apply(20)
        setting.becomes(20, 90)
    finally:
        over.set()
        slow.join()
    assert operator.process.poll() is None


def test_an_operator_that_cannot_reach_its_lease_ends_and_its_successor_finishes(setting: Setting) -> None:
    first = setting.start_operator(lease_duration_seconds=4)
    setting.apply(10)
    setting.becomes(10)
    with setting.server.without_etcd():
        assert first.wait(60) == 1
        assert first.said("the operator ends")[0]["error"] == "LeadershipLostError"
    setting.apply(20)
    setting.start_operator(lease_duration_seconds=60, identity="second")
    setting.becomes(20, 60)
