"""What a pass makes of a cluster, on a real API server."""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_operator.control.cluster import ClusterReconciler
from mooncake_operator.control.contract import Key
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import (
    BY_KIND,
    CLUSTER,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    PREFILL_POOL,
    Object,
)
from mooncake_operator.metrics import Metrics
from mooncake_operator.settings import Settings
from mooncake_testing.apiserver import ApiServer

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"


class World:
    """One namespace, a reconciler, and the calls it made."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.writes: list[tuple[str, str]] = []
        client._observer = self._seen  # the client's own hook, put in after the fixture made it
        self.restart()

    def restart(self) -> None:
        self.reconciler = ClusterReconciler(self.client, Settings(), Metrics())

    def _seen(self, verb: str, plural: str, status: int, seconds: float) -> None:
        if verb not in ("get", "list"):
            self.writes.append((verb, plural))

    async def apply_quickstart(self, change: Callable[[Object], None] = lambda cluster: None) -> Object:
        cluster = yaml.safe_load(QUICKSTART.read_text())
        cluster["metadata"]["namespace"] = self.namespace
        change(cluster)
        return await self.client.apply(cluster, manager="kubectl", force=True)

    async def reconcile(self, name: str = "quickstart") -> list[tuple[str, str]]:
        """One pass; returns the writes that it made."""
        before = len(self.writes)
        await self.reconciler.reconcile(Key(self.namespace, name))
        return self.writes[before:]

    async def until_gone(self, kind: str, name: str, seconds: float = 180) -> None:
        """Pass after pass until an object is gone."""
        async with asyncio.timeout(seconds):
            while True:
                await self.reconcile()
                try:
                    await self.get(kind, name)
                except NotFoundError:
                    return
                await asyncio.sleep(0.1)

    async def get(self, kind: str, name: str) -> Object:
        return await self.client.get(BY_KIND[kind], self.namespace, name)

    async def condition(
        self, type_: str = "Ready", kind: str = "MooncakeCluster", name: str = "quickstart"
    ) -> Object:
        live = await self.get(kind, name)
        return next(c for c in live["status"]["conditions"] if c["type"] == type_)

    async def scale(self, number: int, manager: str = "kubectl", pool: str = "quickstart-prefill") -> None:
        body = {"spec": {"replicas": number}}
        await self.client.patch(
            PREFILL_POOL, self.namespace, pool, body, how="merge", manager=manager, subresource="scale"
        )

    async def replicas(self, pool: str = "quickstart-prefill") -> int:
        number: int = (await self.client.get(PREFILL_POOL, self.namespace, pool))["spec"]["replicas"]
        return number


@pytest.fixture
def world(client: Client, namespace: str) -> World:
    return World(client, namespace)


def set_replicas(number: int) -> Callable[[Object], None]:
    def change(cluster: Object) -> None:
        cluster["spec"]["prefillPools"][0]["replicas"] = number

    return change


async def test_a_cluster_becomes_services_secrets_config_deployment_and_pools(world: World) -> None:
    cluster = await world.apply_quickstart()
    await world.reconcile()
    for kind, name in [
        ("Deployment", "quickstart-scheduler"),
        ("Service", "quickstart-scheduler"),
        ("ConfigMap", "quickstart-scheduler"),
        ("Secret", "quickstart-admin"),
        ("MooncakePrefillPool", "quickstart-prefill"),
        ("MooncakeDecodePool", "quickstart-decode"),
    ]:
        made = await world.get(kind, name)
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (cluster["metadata"]["uid"], True)
    assert (await world.condition())["reason"] == "SchedulerUnavailable"
    assert (await world.get("MooncakeCluster", "quickstart"))["status"]["endpoint"].startswith("http://")


async def test_a_second_pass_writes_nothing_nor_does_one_of_a_restarted_operator_change_anything(
    world: World,
) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    await world.reconcile()
    assert await world.reconcile() == []
    before = await world.get("Deployment", "quickstart-scheduler")
    secret = await world.get("Secret", "quickstart-admin")
    world.restart()
    await world.reconcile()
    after = await world.get("Deployment", "quickstart-scheduler")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert (await world.get("Secret", "quickstart-admin"))["data"] == secret["data"]
    assert len(base64.b64decode(secret["data"]["token"])) >= 32


async def test_scaling_applying_again_and_editing_the_inline_number_do_not_fight(world: World) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    assert await world.replicas() == 2
    await world.scale(2)  # to the present value: takes no ownership
    await world.apply_quickstart()
    await world.reconcile()
    assert await world.replicas() == 2
    await world.scale(5)
    await world.reconcile()
    assert await world.replicas() == 5
    await world.apply_quickstart()
    await world.reconcile()
    assert await world.replicas() == 5, "applying the same cluster again is no wish for other replicas"
    await world.scale(7, manager="horizontal-pod-autoscaler")
    world.restart()
    await world.reconcile()
    assert await world.replicas() == 7, "a restarted operator remembers nothing and needs not"
    await world.apply_quickstart(set_replicas(3))
    await world.reconcile()
    assert await world.replicas() == 3
    await world.apply_quickstart(set_replicas(3))
    await world.scale(4)
    await world.reconcile()
    assert await world.replicas() == 4


async def test_a_spec_of_an_owned_pool_that_someone_edited_is_put_back_but_for_its_replicas(
    world: World,
) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    body = {"spec": {"drain": {"timeoutSeconds": 5}, "replicas": 6}}
    await world.client.patch(
        PREFILL_POOL, world.namespace, "quickstart-prefill", body, how="merge", manager="kubectl-edit"
    )
    await world.reconcile()
    pool = await world.get("MooncakePrefillPool", "quickstart-prefill")
    assert pool["spec"]["drain"]["timeoutSeconds"] != 5
    assert pool["spec"]["replicas"] == 6
    events = await world.client.list_all(EVENT, world.namespace)
    assert "DriftCorrected" in {event["reason"] for event in events}


async def test_a_conflict_becomes_a_condition_that_names_the_other_manager_and_goes_with_it(
    world: World,
) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    body = {"spec": {"replicas": 3}}
    await world.client.patch(
        DEPLOYMENT, world.namespace, "quickstart-scheduler", body, how="merge", manager="other-tool"
    )
    await world.reconcile()
    condition = await world.condition()
    assert (condition["status"], condition["reason"]) == ("False", "FieldManagerConflict")
    assert "other-tool manages spec.replicas" in condition["message"]
    assert (await world.get("Deployment", "quickstart-scheduler"))["spec"]["replicas"] == 3
    await world.reconcile()
    assert ("patch", "mooncakeclusters") not in await world.reconcile(), (
        "the same condition is not written twice"
    )
    body = {"spec": {"replicas": 1}}
    await world.client.patch(
        DEPLOYMENT, world.namespace, "quickstart-scheduler", body, how="merge", manager="other-tool"
    )
    wanted = (await world.get("MooncakeCluster", "quickstart"))["spec"]["scheduler"]["replicas"]
    await world.client.patch(
        DEPLOYMENT,
        world.namespace,
        "quickstart-scheduler",
        {"spec": {"replicas": wanted}},
        how="merge",
        manager="other-tool",
    )
    await world.reconcile()
    assert (await world.condition())["reason"] == "SchedulerUnavailable"


async def test_foreign_objects_of_a_wanted_name_are_left_alone_and_named(world: World) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "quickstart-admin", "namespace": world.namespace},
        "stringData": {"token": "known to all"},
    }
    made = await world.client.create(foreign, manager="test")
    await world.apply_quickstart()
    await world.reconcile()
    condition = await world.condition()
    assert condition["reason"] == "NameTaken"
    assert "Secret quickstart-admin exists and is not this cluster's" in condition["message"]
    assert await world.get("Secret", "quickstart-admin") == made


async def test_an_entry_that_is_removed_takes_its_pool_along_and_nothing_else(world: World) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    standalone: Object = {
        "apiVersion": PREFILL_POOL.api_version,
        "kind": "MooncakePrefillPool",
        "metadata": {"name": "extra", "namespace": world.namespace},
        "spec": {"clusterRef": {"name": "quickstart"}, "replicas": 1},
    }
    await world.client.create(standalone, manager="test")

    def rename(cluster: Object) -> None:
        cluster["spec"]["prefillPools"][0]["name"] = "fast"

    await world.apply_quickstart(rename)
    await world.reconcile()
    assert await world.get("MooncakePrefillPool", "quickstart-fast")
    await world.until_gone("MooncakePrefillPool", "quickstart-prefill")
    assert (await world.get("MooncakePrefillPool", "extra"))["spec"]["replicas"] == 1
    assert (await world.condition())["reason"] == "SchedulerUnavailable"
    assert await world.get("Pod", "extra-p-0")
    assert await world.get("Pod", "quickstart-fast-p-0")


async def test_a_cluster_that_is_being_deleted_gets_nothing_new(world: World) -> None:
    def hold(cluster: Object) -> None:
        cluster["metadata"]["finalizers"] = ["test.mooncake.io/hold"]

    cluster = await world.apply_quickstart(hold)
    await world.client.delete(CLUSTER, world.namespace, "quickstart", uid=cluster["metadata"]["uid"])
    assert await world.reconcile() == []
    await world.client.patch(
        CLUSTER,
        world.namespace,
        "quickstart",
        {"metadata": {"finalizers": None}},
        how="merge",
        manager="test",
    )


async def test_a_deleted_cluster_takes_all_that_it_owns_along(world: World) -> None:
    cluster = await world.apply_quickstart()
    await world.reconcile()
    await world.client.delete(CLUSTER, world.namespace, "quickstart", uid=cluster["metadata"]["uid"])
    for kind, name in [
        ("MooncakePrefillPool", "quickstart-prefill"),
        ("Deployment", "quickstart-scheduler"),
        ("Secret", "quickstart-admin"),
        ("Service", "quickstart-scheduler"),
        ("Pod", "quickstart-prefill-p-0"),
        ("Pod", "quickstart-redis-0"),
    ]:
        await world.until_gone(kind, name)


async def test_a_namespace_that_ends_ends_with_the_operator_at_work(world: World) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    await world.client.delete(
        BY_KIND["Namespace"], None, world.namespace, uid=(await namespace_of(world))["metadata"]["uid"]
    )
    async with asyncio.timeout(180):
        while True:
            await world.reconcile()
            try:
                await namespace_of(world)
            except NotFoundError:
                return
            await asyncio.sleep(0.2)


async def namespace_of(world: World) -> Object:
    return await world.client.get(BY_KIND["Namespace"], None, world.namespace)


async def test_a_secret_that_is_missing_is_named_with_its_key_and_its_field(world: World) -> None:
    def want_keys(cluster: Object) -> None:
        cluster["spec"]["scheduler"]["auth"] = {"apiKeySecretRef": {"name": "keys"}}

    await world.apply_quickstart(want_keys)
    await world.reconcile()
    condition = await world.condition()
    assert condition["reason"] == "ReferenceMissing"
    assert condition["message"] == (
        f"spec.scheduler.auth.apiKeySecretRef: there is no Secret keys in namespace {world.namespace};"
        " make it with the key keys.json"
    )
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys", "namespace": world.namespace},
        "stringData": {"keys.json": "{}"},
    }
    await world.client.create(secret, manager="test")
    await world.reconcile()
    assert (await world.condition())["reason"] == "SchedulerUnavailable"


async def test_a_quota_that_forbids_an_object_is_told_and_the_others_are_made(
    world: World, api_server: ApiServer
) -> None:
    quota: Any = {"metadata": {"name": "tight"}, "spec": {"hard": {"count/configmaps": "0"}}}
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    await world.client._call(
        "POST", CONFIG_MAP, path, body={**quota, "apiVersion": "v1", "kind": "ResourceQuota"}
    )
    status = {"status": {"hard": {"count/configmaps": "0"}, "used": {"count/configmaps": "0"}}}
    await world.client._call(
        "PATCH", CONFIG_MAP, f"{path}/tight/status", body=status, content_type="application/merge-patch+json"
    )
    await world.apply_quickstart()
    async with asyncio.timeout(180):
        while True:
            await world.reconcile()
            condition = await world.condition()
            if condition["reason"] == "QuotaExceeded":
                break
            await asyncio.sleep(0.5)
    assert "ConfigMap quickstart" in condition["message"]
    assert "raise the namespace's ResourceQuota" in condition["message"]
    assert await world.get("Service", "quickstart-scheduler")


async def test_a_pool_without_its_cluster_says_so(world: World) -> None:
    pool: Object = {
        "apiVersion": PREFILL_POOL.api_version,
        "kind": "MooncakePrefillPool",
        "metadata": {"name": "lonely", "namespace": world.namespace},
        "spec": {"clusterRef": {"name": "nowhere"}},
    }
    await world.client.create(pool, manager="test")
    await world.reconcile("nowhere")
    condition = await world.condition("Available", "MooncakePrefillPool", "lonely")
    assert (condition["status"], condition["reason"]) == ("False", "ClusterMissing")
    assert await world.reconcile("nowhere") == []


async def test_what_went_bad_is_told_once_as_an_event_and_what_is_only_under_way_is_not(
    world: World,
) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    await world.reconcile()
    assert await world.client.list_all(EVENT, world.namespace) == []

    def want_keys(cluster: Object) -> None:
        cluster["spec"]["scheduler"]["auth"] = {"apiKeySecretRef": {"name": "keys"}}

    await world.apply_quickstart(want_keys)
    for _ in range(3):
        await world.reconcile()
    (event,) = await world.client.list_all(EVENT, world.namespace)
    assert (event["reason"], event["type"]) == ("ReferenceMissing", "Warning")
    assert event["regarding"]["name"] == "quickstart"
    assert "there is no Secret keys" in event["note"]


async def test_transition_times_stay_while_the_status_of_a_condition_does(world: World) -> None:
    await world.apply_quickstart()
    await world.reconcile()
    before = copy.deepcopy(await world.condition())
    await asyncio.sleep(1.1)
    await world.apply_quickstart(set_replicas(4))
    await world.reconcile()
    after = await world.condition()
    assert after["lastTransitionTime"] == before["lastTransitionTime"]
    assert after["observedGeneration"] == before["observedGeneration"] + 1
