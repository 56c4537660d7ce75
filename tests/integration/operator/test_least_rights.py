"""The operator's rights are those that it needs, no fewer and no more: the API server keeps a record.

One cluster lives through everything that makes the operator write: made, scaled, rolled, undone, broken, cut
down, taken over by another operator, and deleted. Then the record is compared with the chart's roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import ForbiddenError, KubeError, NotFoundError
from mooncake_operator.kube.resources import (
    BY_KIND,
    CLUSTER,
    DECODE_POOL,
    DEPLOYMENT,
    LEASE,
    NAMESPACE,
    POD,
    POOLS,
    SERVICE,
    Object,
    name_of,
    owned_by,
    uid_of,
)
from mooncake_operator.planning import ClusterNames, Port
from mooncake_testing.apiserver import ApiServer, ProgramsMissingError
from mooncake_testing.audit import AuditLog, Right, granted
from mooncake_testing.helm import NAMESPACE as HOME
from mooncake_testing.helm import OPERATOR_ACCOUNT, render
from mooncake_testing.operator_process import OperatorProcess
from mooncake_testing.played_nodes import PlayedNodes, PlayedScheduler

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
LEAVING_ACCOUNT = f"{OPERATOR_ACCOUNT}-leave"
OWNER_CHECK = "OwnerReferencesPermissionEnforcement"
_PATIENCE_S = 400.0

pytestmark = pytest.mark.timeout(1800, func_only=True)


class Life:
    """A cluster called quickstart, those who look after it, and what happens to it."""

    def __init__(
        self, server: ApiServer, audit: AuditLog, admin: Client, namespace: str, directory: Path
    ) -> None:
        self.server = server
        self.audit = audit
        self.admin = admin
        self.namespace = namespace
        self._directory = directory
        self.operators: list[OperatorProcess] = []
        # The operator asks schedulers at a port of its own choosing: an address that nobody else has.
        self._address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(2, 254)}"
        self.scheduler = PlayedScheduler()
        self.nodes = PlayedNodes(admin, namespace, self.scheduler, self._address)
        self.manifest: Any = yaml.safe_load(QUICKSTART.read_text())
        self.manifest["metadata"]["namespace"] = namespace
        for pools in ("prefillPools", "decodePools"):
            self.manifest["spec"][pools][0]["drain"] = {"timeoutSeconds": 1}

    @contextlib.asynccontextmanager
    async def lived(self) -> AsyncIterator[None]:
        """Nodes and schedulers do their part meanwhile."""
        async with self.scheduler.serve(self._address, ClusterNames().port("", Port.ADMIN)):
            playing = asyncio.create_task(self._play())
            try:
                yield
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)

    def start_operator(self, **settings: Any) -> OperatorProcess:
        started = OperatorProcess(
            self.server.write_kubeconfig("operator", OPERATOR_ACCOUNT),
            self._directory / f"operator-{len(self.operators)}",
            lease_namespace=HOME,
            lease_duration_seconds=6,
            resync_seconds=5,
            backoff_max_seconds=1,
            identity=f"operator-{len(self.operators)}",
            **settings,
        )
        self.operators.append(started)
        return started

    async def apply(self, change: Callable[[Any], None] = lambda spec: None) -> None:
        change(self.manifest["spec"])
        await self.admin.apply(self.manifest, manager="kubectl", force=True)

    async def until(self, holds: Callable[[], Awaitable[object]], what: str) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    with contextlib.suppress(KubeError):
                        if await holds():
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            cluster = await self.find(CLUSTER.kind, "quickstart")
            said = (cluster or {}).get("status", {}).get("conditions")
            raise AssertionError(f"not within {_PATIENCE_S:.0f} s: {what}; {said}") from None

    async def find(self, kind: str, name: str) -> Object | None:
        try:
            return await self.admin.get(BY_KIND[kind], self.namespace, name)
        except NotFoundError:
            return None

    async def ready(self) -> Object:
        cluster = await self.find("MooncakeCluster", "quickstart") or {}
        conditions = cluster.get("status", {}).get("conditions", ())
        found: Object = next((c for c in conditions if c["type"] == "Ready"), {})
        newest = cluster.get("metadata", {}).get("generation") == found.get("observedGeneration")
        return found if newest else {}

    async def is_ready(self) -> bool:
        return (await self.ready()).get("status") == "True"

    async def revisions_in_use(self) -> set[str]:
        """Of the decode pool."""
        pods = (await self.nodes.pods("decode")).values()
        own = [
            pod for pod in pods if pod["metadata"]["labels"].get("mooncake.io/pool") == "quickstart-decode"
        ]
        return {pod["metadata"]["labels"]["mooncake.io/revision"] for pod in own}

    async def _play(self) -> None:
        while True:
            # Whoever else writes to the same objects wins; the next step does it again.
            with contextlib.suppress(KubeError):
                await self.nodes.play()
                await self._run_schedulers()
            await asyncio.sleep(0.1)

    async def _run_schedulers(self) -> None:
        deployment = await self.find("Deployment", "quickstart-scheduler")
        if deployment is None:
            return
        wanted = deployment["spec"].get("replicas", 1)
        counts = {
            field: wanted for field in ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
        }
        status = {"observedGeneration": deployment["metadata"]["generation"], **counts}
        if deployment.get("status") != status:
            await self.admin.patch(
                DEPLOYMENT,
                self.namespace,
                name_of(deployment),
                {"status": status},
                how="merge",
                manager="controllers",
                subresource="status",
            )
        if await self.find("Pod", "quickstart-scheduler-0") is None:
            await self.nodes.add_scheduler("quickstart")


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path)


@pytest.fixture
def server(tmp_path: Path, audit: AuditLog) -> Iterator[ApiServer]:
    """With a record, and with the check of owner references that OpenShift has."""
    directory = tmp_path / "kubernetes"
    directory.mkdir()
    arguments = (*audit.arguments, f"--enable-admission-plugins={OWNER_CHECK}")
    try:
        started = ApiServer(directory, arguments)
    except ProgramsMissingError as error:
        pytest.skip(str(error))
    try:
        for account in (OPERATOR_ACCOUNT, LEAVING_ACCOUNT):
            started.add_user(account, token=account)
        started.kill()
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture
async def life(server: ApiServer, audit: AuditLog, tmp_path: Path) -> AsyncIterator[Life]:
    configuration = Configuration()
    await config.load_kube_config(str(server.kubeconfig), client_configuration=configuration)
    async with Client(configuration) as admin:
        for name in (HOME, "life"):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await admin.create(body, manager="test")
        made = Life(server, audit, admin, "life", tmp_path)
        try:
            async with made.lived():
                yield made
        finally:
            for operator in made.operators:
                operator.kill()


def install_roles(server: ApiServer, objects: list[Object]) -> list[Object]:
    """Create a chart's roles and bindings; the roles."""
    for obj in objects:
        group = f"/apis/{obj['apiVersion']}"
        namespace = obj["metadata"].get("namespace")
        place = f"{group}/namespaces/{namespace}" if namespace else group
        server.request("POST", f"{place}/{obj['kind'].lower()}s", obj)
    return [obj for obj in objects if obj["kind"] in ("ClusterRole", "Role")]


def bound_to(account: str, values: Any = None) -> list[Object]:
    """Roles and bindings of the chart that concern a service account."""
    rendered = render(values)
    name = account.rpartition(":")[2]
    bindings = [
        obj for obj in rendered if obj["kind"].endswith("Binding") and obj["subjects"][0]["name"] == name
    ]
    roles = [
        obj
        for obj in rendered
        for binding in bindings
        if (obj["kind"], obj["metadata"]["name"]) == (binding["roleRef"]["kind"], binding["roleRef"]["name"])
    ]
    return [*roles, *bindings]


async def test_in_a_whole_life_the_operator_is_refused_nothing_and_uses_all_that_it_is_granted(
    life: Life, server: ApiServer, audit: AuditLog
) -> None:
    roles = install_roles(server, bound_to(OPERATOR_ACCOUNT))
    first = life.start_operator()

    await it_waits_for_a_secret_and_becomes_ready(life)
    await it_leaves_a_foreign_pod_alone_and_scales(life)
    await it_rolls_and_goes_back(life)
    await it_mends_what_breaks(life)
    await it_reads_why_a_pod_is_silent(life)
    await it_gives_up_what_is_no_longer_wanted(life)
    await another_takes_over(life, first)
    await the_namespace_goes(life)

    assert audit.refused(OPERATOR_ACCOUNT) == []
    # Owners' finalizers are asked about when an object with an owner is written: no request of its own.
    asked = {right for right in granted(roles) if right.resource.endswith("/finalizers")}
    assert {right.verb for right in asked} == {"update"}
    assert sorted(granted(roles) - asked - audit.used(OPERATOR_ACCOUNT)) == []


async def test_where_the_operator_looks_after_one_namespace_the_rights_in_it_are_enough(
    life: Life, server: ApiServer, audit: AuditLog
) -> None:
    install_roles(server, bound_to(OPERATOR_ACCOUNT, {"operator": {"watchNamespaces": [life.namespace]}}))
    life.start_operator(namespaces=life.namespace, scan=False)

    await it_waits_for_a_secret_and_becomes_ready(life)
    await it_mends_what_breaks(life)
    assert audit.refused(OPERATOR_ACCOUNT) == []

    # Its roles in the namespace go first; its finalizers must not stay behind.
    await the_namespace_goes(life)


async def it_waits_for_a_secret_and_becomes_ready(life: Life) -> None:
    def more(spec: Any) -> None:
        spec["scheduler"]["auth"] = {"apiKeySecretRef": {"name": "keys"}}
        for role in ("prefill", "decode"):
            spec[f"{role}Pools"].append({"name": f"more-{role}", "drain": {"timeoutSeconds": 1}})

    await life.apply(more)

    async def says_what_is_missing() -> bool:
        return "Secret keys" in (await life.ready()).get("message", "")

    await life.until(says_what_is_missing, "the missing Secret is named")
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys", "namespace": life.namespace},
        "stringData": {"keys.json": "{}"},
    }
    await life.admin.create(secret, manager="kubectl")
    await life.until(life.is_ready, "the cluster is Ready")


async def it_leaves_a_foreign_pod_alone_and_scales(life: Life) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "quickstart-decode-d-2",
            "namespace": life.namespace,
            # Taken from another cluster, so that it is not among the strangers of the namespace.
            "labels": {"app.kubernetes.io/managed-by": "mooncake-operator", "mooncake.io/cluster": "other"},
        },
        "spec": {"containers": [{"name": "theirs", "image": "theirs"}]},
    }
    made = await life.admin.create(foreign, manager="kubectl")
    await life.admin.patch(
        DECODE_POOL,
        life.namespace,
        "quickstart-decode",
        {"spec": {"replicas": 3}},
        how="merge",
        manager="kubectl",
        subresource="scale",
    )

    async def says_whose_it_is() -> bool:
        pool = await life.find("MooncakeDecodePool", "quickstart-decode")
        assert pool is not None
        return any("quickstart-decode-d-2" in c.get("message", "") for c in pool["status"]["conditions"])

    await life.until(says_whose_it_is, "the foreign Pod is named")
    await life.admin.delete(POD, life.namespace, "quickstart-decode-d-2", uid=uid_of(made), grace_s=0)

    async def has_three() -> bool:
        pool = await life.find("MooncakeDecodePool", "quickstart-decode")
        assert pool is not None
        return pool["status"].get("routableReplicas") == 3

    await life.until(has_three, "three instances are routable")


async def it_rolls_and_goes_back(life: Life) -> None:
    before = await life.revisions_in_use()
    for scale in (20, 10):

        def edit(spec: Any, scale: int = scale) -> None:
            spec["engine"]["simulated"]["timeScale"] = scale

        await life.apply(edit)

        async def is_rolled(scale: int = scale) -> bool:
            used = await life.revisions_in_use()
            return len(used) == 1 and (used == before) == (scale == 10) and await life.is_ready()

        await life.until(is_rolled, f"all instances are of time scale {scale}")


async def it_mends_what_breaks(life: Life) -> None:
    pods = await life.nodes.pods("prefill")
    name, pod = sorted(pods.items())[0]
    await life.nodes.set_status(name, {"phase": "Failed", "reason": "Evicted", "message": "of the test"})

    async def is_another() -> bool:
        found = await life.find("Pod", name)
        return found is not None and uid_of(found) != uid_of(pod)

    await life.until(is_another, "the failed Pod is replaced")
    service = await life.find("Service", "quickstart-scheduler")
    assert service is not None
    await life.admin.delete(SERVICE, life.namespace, "quickstart-scheduler", uid=uid_of(service))

    async def is_back() -> bool:
        return await life.find("Service", "quickstart-scheduler") is not None

    await life.until(is_back, "the deleted Service is back")


async def it_reads_why_a_pod_is_silent(life: Life) -> None:
    """A Pod that was bound to a node, of which the kubelet tells in Events only."""
    life.nodes.trouble = lambda pod: {"phase": "Pending"}
    name, pod = sorted((await life.nodes.pods("prefill")).items())[0]
    await life.admin.delete(POD, life.namespace, name, uid=uid_of(pod), grace_s=0)
    bound: set[str] = set()

    async def is_asked_about() -> bool:
        found = await life.find("Pod", name)
        if found is not None and not found["spec"].get("nodeName") and uid_of(found) not in bound:
            bound.add(uid_of(found))
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": "node-0"},
            }
            path = f"/api/v1/namespaces/{life.namespace}/pods/{name}/binding"
            await asyncio.to_thread(life.server.request, "POST", path, binding)
        return Right("events.k8s.io", "events", "list") in life.audit.used(OPERATOR_ACCOUNT)

    await life.until(is_asked_about, "the Pod's Events are read")
    life.nodes.trouble = lambda pod: None
    await life.until(life.is_ready, "the cluster is Ready again")


async def it_gives_up_what_is_no_longer_wanted(life: Life) -> None:
    def smaller(spec: Any) -> None:
        del spec["kvCachePools"]
        spec["scheduler"] = {"replicas": 1}
        for pools in ("prefillPools", "decodePools"):
            del spec[pools][1]
            spec[pools][0]["replicas"] = 1

    await life.apply(smaller)

    async def is_small() -> bool:
        gone = (
            ("MooncakeKVCachePool", "quickstart-kv"),
            ("MooncakePrefillPool", "quickstart-more-prefill"),
            ("MooncakeDecodePool", "quickstart-more-decode"),
            ("Secret", "quickstart-redis"),
            ("Service", "quickstart-redis"),
            ("NetworkPolicy", "quickstart-redis"),
            ("ConfigMap", "quickstart-engine"),
            ("PodDisruptionBudget", "quickstart-prefill"),
        )
        return not [one for one in gone if await life.find(*one) is not None]

    await life.until(is_small, "store, Redis and budgets are gone")
    await life.until(life.is_ready, "the small cluster is Ready")


async def another_takes_over(life: Life, first: OperatorProcess) -> None:
    first.kill()
    second = life.start_operator()

    async def leads() -> bool:
        return await asyncio.to_thread(lambda: second.leads)

    await life.until(leads, "the second operator leads")


async def the_namespace_goes(life: Life) -> None:
    found = await life.admin.get(NAMESPACE, None, life.namespace)
    await life.admin.delete(NAMESPACE, None, life.namespace, uid=uid_of(found))

    async def is_gone() -> bool:
        for resource in (CLUSTER, *POOLS):
            if await life.admin.list_all(resource, life.namespace):
                return False
        return True

    await life.until(is_gone, "no object of ours keeps the namespace")


async def test_who_leaves_may_take_off_finalizers_and_the_lease_and_nothing_else(
    life: Life, server: ApiServer, audit: AuditLog
) -> None:
    install_roles(server, bound_to(OPERATOR_ACCOUNT))
    operator = life.start_operator()
    await life.apply()
    await life.until(life.is_ready, "the cluster is Ready")
    pods = {name: uid_of(pod) for name, pod in (await life.nodes.pods()).items()}
    others = ["example.com/theirs", "mooncake.io/drain"]
    await life.admin.patch(
        DECODE_POOL,
        life.namespace,
        "quickstart-decode",
        {"metadata": {"finalizers": others}},
        how="merge",
        manager="kubectl",
    )
    operator.kill()
    roles = install_roles(server, bound_to(LEAVING_ACCOUNT))

    left = await asyncio.to_thread(leave, server)

    assert left.returncode == 0, left.stdout
    assert audit.refused(LEAVING_ACCOUNT) == []
    # A pool is read again only where somebody else wrote to it at the same moment.
    conflict = {right for right in granted(roles) if right.group == "mooncake.io" and right.verb == "get"}
    assert sorted(granted(roles) - conflict - audit.used(LEAVING_ACCOUNT)) == []
    assert await finalizers(life) == {
        "quickstart-prefill": [],
        "quickstart-decode": ["example.com/theirs"],
        "quickstart-kv": [],
    }
    assert {name: uid_of(pod) for name, pod in (await life.nodes.pods()).items()} == pods
    assert not await life.admin.list_all(LEASE, HOME)

    again = await asyncio.to_thread(leave, server)
    assert again.returncode == 0, again.stdout


def leave(server: ApiServer) -> subprocess.CompletedProcess[str]:
    environment = {
        "KUBECONFIG": str(server.write_kubeconfig("leaving", LEAVING_ACCOUNT)),
        "MOONCAKE_OPERATOR_LEASE_NAMESPACE": HOME,
        "MOONCAKE_OPERATOR_LEASE_DURATION_SECONDS": "6",
    }
    return subprocess.run(
        [sys.executable, "-m", "mooncake_operator.leave"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


async def finalizers(life: Life) -> dict[str, list[str]]:
    pools = [pool for kind in POOLS for pool in await life.admin.list_all(kind, life.namespace)]
    return {name_of(pool): pool["metadata"].get("finalizers", []) for pool in pools}


async def test_an_object_whose_owner_waits_for_it_may_be_written_only_with_the_rule_for_finalizers(
    life: Life, server: ApiServer
) -> None:
    """The rule that no request shows: what would be refused without it."""
    objects = bound_to(OPERATOR_ACCOUNT)
    for role in objects:
        if "rules" in role:
            role["rules"] = [
                rule
                for rule in role["rules"]
                if not any(resource.endswith("/finalizers") for resource in rule["resources"])
            ]
    install_roles(server, objects)
    await life.apply()
    cluster = await life.find("MooncakeCluster", "quickstart")
    assert cluster is not None
    configuration = Configuration()
    await config.load_kube_config(
        str(server.write_kubeconfig("operator", OPERATOR_ACCOUNT)), client_configuration=configuration
    )
    owned = owned_by(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "owned", "namespace": life.namespace},
        },
        cluster,
    )
    async with Client(configuration) as operator:
        with pytest.raises(ForbiddenError, match="cannot set blockOwnerDeletion"):
            await operator.create(owned, manager="test")
