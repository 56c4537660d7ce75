"""What goes wrong ends in a condition that says what, where and what to do, is quiet meanwhile, and heals.

A real API server with its real admission plugins; kubelets, kube-scheduler and schedulers are played.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.resources import (
    BY_KIND,
    CLUSTER,
    DECODE_POOL,
    DEPLOYMENT,
    EVENT,
    KV_CACHE_POOL,
    NAMESPACE,
    POD,
    PREFILL_POOL,
    SECRET,
    Object,
    name_of,
    uid_of,
)
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_nodes import PlayedScheduler
from mooncake_testing.played_world import PlayedWorld
from mooncake_testing.simulated import Simulated

PREFILL = ("MooncakePrefillPool", "q-prefill")


@pytest.fixture
async def world(client: Client, namespace: str) -> AsyncIterator[PlayedWorld]:
    async with PlayedScheduler().serve() as scheduler:
        yield PlayedWorld(client, namespace, scheduler)


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    with Simulated() as processes:
        yield processes


async def turns(world: PlayedWorld, type_: str, status: str, *where: str, steps: int = 20) -> Object:
    """The condition, once it has this status."""
    await world.step()

    async def holds() -> bool:
        return (await world.condition(type_, *where)).get("status") == status

    await world.until(holds, f"{type_} is {status}", steps)
    return await world.condition(type_, *where)


def changes(world: PlayedWorld) -> list[tuple[str, str]]:
    """What the last pass wrote, Pods that are tried again apart: one of each pool."""
    tries = world.writes.count(("post", "pods"))
    assert tries <= 5
    return [write for write in world.writes if write != ("post", "pods")]


async def is_quiet(world: PlayedWorld, passes: int = 4) -> None:
    """With nothing new to say nothing is written, and nobody looks again at once."""
    await world.step()

    async def is_silent() -> bool:
        return changes(world) == []

    await world.until(is_silent, "nothing more is written")
    for _ in range(passes):
        result = await world.step()
        assert changes(world) == []
        assert result.requeue_after_s is not None
        assert result.requeue_after_s >= 1


async def later(world: PlayedWorld, seconds: float) -> None:
    """Let time pass for the operator and for the scheduler's measurements."""
    world.passed_s += seconds
    world.scheduler.now_s += seconds
    await world.step()


async def events(world: PlayedWorld) -> list[str]:
    found = await world.client.list_all(EVENT, world.namespace)
    return sorted(
        event["reason"] for event in found if event.get("reportingController") == "mooncake.io/operator"
    )


# -- what schedulers and stores say of themselves


async def test_slo_and_columns_follow_what_the_schedulers_measure(world: PlayedWorld) -> None:
    await world.bring_up()
    await later(world, 30)
    unknown = await world.condition("SLOMet")
    assert (unknown["status"], unknown["reason"]) == ("Unknown", "NoTraffic")
    world.scheduler.serves(100, ttft_s=2, tbt_s=0.05)
    await later(world, 30)
    met = await world.condition("SLOMet")
    assert (met["status"], met["reason"]) == ("True", "TargetsKept")
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    assert (cluster["status"]["ttft"], cluster["status"]["tbt"]) == ("2s", "50ms")
    world.scheduler.serves(10, ttft_s=45, tbt_s=0.05)
    await later(world, 30)
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    assert cluster["status"]["ttft"] == "2s", "numbers stand for a minute"
    world.scheduler.serves(90, ttft_s=45, tbt_s=0.05)
    await later(world, 30)
    missed = await world.condition("SLOMet")
    assert (missed["status"], missed["reason"]) == ("False", "TargetsMissed")
    assert "50 % of requests keep TTFT 30s (wanted: 90 %)" in missed["message"]
    assert "TargetsMissed" in await events(world)
    assert (await world.condition("Ready"))["status"] == "True", "slow is not broken"
    await later(world, 400)
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    assert "ttft" not in cluster["status"]
    assert (await world.condition("SLOMet"))["status"] == "Unknown"
    for _ in range(10):
        await later(world, 31)
        assert world.writes == [], "an idle cluster writes nothing"


async def test_a_busy_cluster_writes_its_measurements_at_a_bounded_rate(world: PlayedWorld) -> None:
    await world.bring_up()
    written = 0
    for minute_half in range(20):
        world.scheduler.serves(50, ttft_s=1 + minute_half, tbt_s=0.05)
        await later(world, 30)
        written += sum(plural == "mooncakeclusters" for _, plural in world.writes)
    assert 1 <= written <= 10, "once a minute at most"


async def test_a_store_says_how_much_of_its_capacity_is_there(
    world: PlayedWorld, simulated: Simulated
) -> None:
    master = simulated.master()
    world.store_port = master.base + 1
    world.restart()
    await world.bring_up()
    where = ("MooncakeKVCachePool", "q-kv")
    missing = await world.condition("CapacityReady", *where)
    assert (missing["status"], missing["reason"]) == ("False", "SegmentsMissing")
    assert "0 of 8Ti (1 × 8Ti) are mounted" in missing["message"]
    assert (await world.condition("MasterReady", *where))["status"] == "True"
    simulated.node(master, size=str(8 << 40))
    await later(world, 30)
    there = await world.condition("CapacityReady", *where)
    assert (there["status"], there["reason"]) == ("True", "SegmentsMounted")
    store = await world.get(*where)
    assert store is not None
    assert (store["status"]["capacity"], store["status"]["used"]) == ("8Ti", "0%")
    master.kill()
    await later(world, 30)
    gone = await world.condition("CapacityReady", *where)
    assert (gone["status"], gone["reason"]) == ("Unknown", "MasterUnreachable")
    await is_quiet(world)


async def test_schedulers_that_do_not_answer_are_named_after_a_while_and_forgiven_at_once(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    world.scheduler.away = True
    await world.step()
    assert (await world.condition("SchedulerReady"))["status"] == "True", "a hiccup is no news"
    await later(world, 25)
    silent = await world.condition("SchedulerReady")
    assert (silent["status"], silent["reason"]) == ("False", "SchedulerUnreachable")
    assert "none answers the operator on its admin port (127.0.0.1: HTTP 503)" in silent["message"]
    assert (await world.condition("Ready"))["reason"] == "SchedulerUnreachable"
    await is_quiet(world)
    world.restart()
    await world.step()
    assert (await world.condition("SchedulerReady"))["status"] == "False", (
        "a new operator believes the status"
    )
    world.scheduler.away = False
    await turns(world, "Ready", "True")


async def test_a_redis_that_is_away_is_told_while_requests_are_served_on(world: PlayedWorld) -> None:
    await world.bring_up()
    world.scheduler.degraded = True
    await world.step()
    await later(world, 25)
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "SharedStateAway")
    assert "requests are served, but the registry is away" in ready["message"]
    assert "spec.scheduler.redis" in ready["message"]
    assert (await world.condition("SchedulerReady"))["status"] == "True"
    await is_quiet(world)
    world.scheduler.degraded = False
    await turns(world, "Ready", "True")


# -- what nodes and the kube-scheduler say


@pytest.mark.parametrize(
    ("message", "reason", "remedy"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "InsufficientGPU", "add nodes with free"),
        ("0/1 nodes are available: 1 Insufficient rdma/hca_a.", "InsufficientRDMA", "RDMA device plugin"),
        (
            "0/1 nodes are available: 1 Insufficient hugepages-2Mi.",
            "InsufficientHugepages",
            "reserve hugepages",
        ),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {gpu: yes}.",
            "UntoleratedTaint",
            "add a toleration",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
            "NoMatchingNode",
            "label a node",
        ),
        (
            'persistentvolumeclaim "models" not found',
            "VolumeMissing",
            "make the PersistentVolumeClaim in the Pod's namespace",
        ),
    ],
)
async def test_a_pod_without_a_node_is_told_with_the_cause_and_is_well_once_it_has_one(
    world: PlayedWorld, message: str, reason: str, remedy: str
) -> None:
    world.nodes.broken.add("q-prefill-p-1")
    await world.apply()
    await world.step()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    await world.nodes.set_status("q-prefill-p-1", {"conditions": [unscheduled]})
    scheduled = await turns(world, "Scheduled", "False", *PREFILL)
    assert scheduled["reason"] == reason
    assert f"Pod q-prefill-p-1: {message}; " in scheduled["message"]
    assert remedy in scheduled["message"]
    assert (await world.condition("Available", *PREFILL))["reason"] == reason
    await is_quiet(world)
    assert reason in await events(world)
    world.nodes.broken.clear()
    await turns(world, "Scheduled", "True", *PREFILL)


def waiting(reason: str, message: str = "", **more: Any) -> Object:
    container = {"name": "engine", "image": "x:y", "imageID": "", "ready": False, "restartCount": 0, **more}
    container.setdefault("state", {"waiting": {"reason": reason, "message": message}})
    return {"phase": "Pending", "containerStatuses": [container]}


async def test_an_image_that_cannot_be_pulled_is_told_once_and_forgotten_when_it_is_there(
    world: PlayedWorld,
) -> None:
    world.nodes.broken.add("q-prefill-p-0")
    await world.apply()
    await world.step()
    said = 'failed to pull and unpack image "x:y": not found'
    for reason, message in (
        ("ErrImagePull", said),
        ("ImagePullBackOff", f'Back-off pulling image "x:y": ErrImagePull: {said}'),
    ) * 2:
        await world.nodes.set_status("q-prefill-p-0", waiting(reason, message))
        await world.step()
    degraded = await world.condition("Degraded", *PREFILL)
    assert (degraded["status"], degraded["reason"]) == ("True", "ImageUnavailable")
    assert f"Pod q-prefill-p-0, container engine: {said}; " in degraded["message"]
    assert (await events(world)).count("ImageUnavailable") == 2, "of Degraded and of Available, once each"
    await is_quiet(world)
    world.nodes.broken.clear()
    await turns(world, "Degraded", "False", *PREFILL)


async def test_a_crash_loop_keeps_the_exit_code_and_the_last_line_whatever_the_container_does_meanwhile(
    world: PlayedWorld,
) -> None:
    world.nodes.broken.add("q-prefill-p-0")
    await world.apply()
    await world.step()
    ended = {
        "terminated": {"exitCode": 1, "reason": "Error", "message": "loading\nCUDA out of memory\n"},
    }
    states = (
        {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}},
        {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        ended,
    )
    told = []
    for state in states:
        status = waiting("", state=state, lastState=ended, restartCount=3)
        await world.nodes.set_status("q-prefill-p-0", status | {"phase": "Running"})
        await world.step()
        degraded = await world.condition("Degraded", *PREFILL)
        told.append((degraded["status"], degraded["reason"], degraded["message"]))
    assert len(set(told)) == 1, "it does not come and go"
    assert told[0][:2] == ("True", "Crashing")
    assert "container engine exited with 1, CUDA out of memory" in told[0][2]
    assert "kubectl logs q-prefill-p-0 --previous" in told[0][2]
    await is_quiet(world)


async def say(world: PlayedWorld, reason: str, note: str, **regarding: str) -> None:
    """An Event as another component posts it."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    event = {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{regarding['name']}.{reason.lower()}", "namespace": world.namespace},
        "eventTime": stamp,
        "type": "Warning",
        "reason": reason,
        "action": "Start",
        "note": note,
        "reportingController": "kubelet",
        "reportingInstance": "node-0",
        "regarding": {"apiVersion": "v1", "namespace": world.namespace, **regarding},
    }
    await world.client.create(event, manager="kubelet")


@pytest.mark.parametrize(
    ("said", "note", "reason"),
    [
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "x" : configmap "tuning" not found',
            "ConfigMissing",
        ),
        ("FailedAttachVolume", "AttachVolume.Attach failed for volume x: no such disk", "VolumeMissing"),
        ("FailedCreatePodSandBox", "failed to set up sandbox: no CNI plugin", "SandboxFailed"),
    ],
)
async def test_a_pod_that_hangs_silently_is_explained_by_its_events(
    world: PlayedWorld, said: str, note: str, reason: str
) -> None:
    world.nodes.broken.add("q-prefill-p-0")
    await world.apply()
    await world.step()
    pod = (await world.nodes.pods())["q-prefill-p-0"]
    await world.nodes.bind("q-prefill-p-0")
    await world.nodes.set_status("q-prefill-p-0", waiting("ContainerCreating"))
    await say(world, said, note, kind="Pod", name="q-prefill-p-0", uid=uid_of(pod))
    result = await world.step()
    assert result.requeue_after_s is not None
    assert result.requeue_after_s <= 12, "somebody looks when it has been silent for a while"
    await later(world, 15)
    degraded = await turns(world, "Degraded", "True", *PREFILL)
    assert degraded["reason"] == reason
    assert note in degraded["message"]
    await is_quiet(world)
    world.nodes.broken.clear()
    await turns(world, "Degraded", "False", *PREFILL)


async def test_a_claim_that_is_not_bound_is_explained_by_its_own_events(world: PlayedWorld) -> None:
    def on_a_claim(spec: Any) -> None:
        volume = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        spec["model"] |= {"path": "/models/m", "volume": volume}

    world.nodes.broken |= {"q-prefill-p-0", "q-prefill-p-1"}
    await world.apply(on_a_claim)
    await world.step()
    message = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    await world.nodes.set_status("q-prefill-p-0", {"conditions": [unscheduled]})
    note = 'storageclass.storage.k8s.io "fast" not found'
    await say(world, "ProvisioningFailed", note, kind="PersistentVolumeClaim", name="models")
    await later(world, 15)
    scheduled = await turns(world, "Scheduled", "False", *PREFILL)
    assert scheduled["reason"] == "VolumeUnbound"
    assert f"PersistentVolumeClaim models: {note}" in scheduled["message"]
    await is_quiet(world)


async def test_a_scheduler_pod_that_cannot_start_is_named_by_the_cluster(world: PlayedWorld) -> None:
    await world.apply()
    await world.nodes.add_scheduler("q")
    world.nodes.broken.add("q-scheduler-0")
    await world.step()
    said = 'container scheduler: secret "kimi-keys" not found'
    await world.nodes.set_status(
        "q-scheduler-0",
        waiting("CreateContainerConfigError", 'secret "kimi-keys" not found', name="scheduler"),
    )
    ready = await turns(world, "SchedulerReady", "False")
    await world.step()
    ready = await world.condition("Ready")
    assert ready["reason"] == "ConfigMissing"
    assert f"0 of 2 schedulers are available; Pod q-scheduler-0, {said}" in ready["message"]


async def test_schedulers_of_a_new_template_that_cannot_be_made_are_told_while_the_old_ones_serve(
    world: PlayedWorld,
) -> None:
    await world.bring_up()

    def place(spec: Any) -> None:
        spec["scheduler"]["podTemplate"] = {"spec": {"priorityClassName": "nobodys"}}

    await world.apply(place)
    await world.step()
    refused = 'pods "q-scheduler-1" is forbidden: no PriorityClass with name nobodys was found'
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": refused}

    async def deploy(**counts: Any) -> None:
        live = await world.get("Deployment", "q-scheduler")
        assert live is not None
        seen = {"observedGeneration": live["metadata"]["generation"], "availableReplicas": 2}
        await world.client.patch(
            DEPLOYMENT,
            world.namespace,
            "q-scheduler",
            {"status": {**seen, "readyReplicas": 2, **counts}},
            how="merge",
            manager="test",
            subresource="status",
        )
        await world.step()

    await deploy(replicas=2, updatedReplicas=0)
    assert (await world.condition("Ready"))["status"] == "True", "a rollout is no trouble"
    await deploy(replicas=2, updatedReplicas=0, conditions=[failure])
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ReferenceMissing")
    assert ready["message"].startswith("Deployment q-scheduler: the newest configuration is not in use; ")
    assert refused in ready["message"]
    assert (await world.condition("SchedulerReady"))["status"] == "True"
    await deploy(replicas=3, updatedReplicas=2, conditions=[failure])
    assert not await world.is_ready(), "an old one is still there"
    await deploy(replicas=2, updatedReplicas=2, conditions=[])
    assert await world.is_ready()


# -- what the API server refuses


async def restrict(world: PlayedWorld, labels: dict[str, str | None]) -> None:
    await world.client.patch(
        NAMESPACE, None, world.namespace, {"metadata": {"labels": labels}}, how="merge", manager="test"
    )


async def test_pods_that_pod_security_forbids_are_told_and_made_once_it_allows_them(
    world: PlayedWorld,
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    await restrict(world, {level: "baseline"})

    def see_the_host(spec: Any) -> None:
        volume = {"name": "host", "hostPath": {"path": "/"}}
        spec["prefillPools"][0]["podTemplate"] = {"spec": {"volumes": [volume]}}

    await world.apply(see_the_host)
    degraded = await turns(world, "Degraded", "True", *PREFILL)
    assert degraded["reason"] == "PodSecurityForbidden", degraded["message"]
    assert 'violates PodSecurity "baseline' in degraded["message"]
    assert "label the namespace with a level that allows it" in degraded["message"]
    await is_quiet(world)
    await restrict(world, {level: None})
    await turns(world, "Degraded", "False", *PREFILL)


async def post(api_server: ApiServer, path: str, body: Object) -> None:
    api_server.request("POST", path, body)


async def refused_then_made(
    world: PlayedWorld, reason: str, words: str, undo: Callable[[], Awaitable[None]]
) -> None:
    """All Pods of a pool are refused for this reason; once its cause is gone they are made."""
    degraded = await turns(world, "Degraded", "True", *PREFILL)
    assert degraded["reason"] == reason
    assert words in degraded["message"]
    available = await world.condition("Available", *PREFILL)
    assert (available["status"], available["reason"]) == ("False", reason)
    assert (await world.condition("Scheduled", *PREFILL))["status"] == "Unknown"
    await is_quiet(world)
    await undo()
    await turns(world, "Degraded", "False", *PREFILL, steps=60)
    assert await world.pods("prefill")


async def test_a_quota_on_pods_is_told_and_pods_are_made_once_there_is_room(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    path = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    hard = {"requests.nvidia.com/gpu": "0"}
    await post(api_server, path, {"metadata": {"name": "tight"}, "spec": {"hard": hard}})
    status = {"status": {"hard": hard, "used": hard}}
    api_server.request("PATCH", f"{path}/tight/status", status, "application/merge-patch+json")

    def want_gpus(spec: Any) -> None:
        for pools in ("prefillPools", "decodePools"):
            spec[pools][0] |= {"resources": {"gpu": {"count": 1}}}

    async def undo() -> None:
        api_server.request("DELETE", f"{path}/tight")

    await world.apply(want_gpus)
    await refused_then_made(world, "QuotaExceeded", "exceeded quota: tight", undo)


async def count(world: PlayedWorld, api_server: ApiServer, **hard: str) -> str:
    """A ResourceQuota with room for all that says what it takes; returns the path of its namespace."""
    path = f"/api/v1/namespaces/{world.namespace}"
    await post(api_server, f"{path}/resourcequotas", {"metadata": {"name": "some"}, "spec": {"hard": hard}})
    used = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
    api_server.request("PATCH", f"{path}/resourcequotas/some/status", used, "application/merge-patch+json")
    return path


async def test_where_requests_are_counted_a_cluster_whose_pools_say_theirs_is_made(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    path = await count(world, api_server, **{"requests.cpu": "100", "requests.memory": "1Ti"})

    def say_so(spec: Any) -> None:
        for pools in ("prefillPools", "decodePools"):
            spec[pools][0]["resources"] = {"cpu": "1", "memory": "1Gi"}
        del spec["kvCachePools"]

    await world.apply(say_so)

    async def is_made() -> bool:
        return all([await world.pods(role) for role in ("prefill", "decode", "redis")])

    await world.until(is_made, "Pods of all pools and Redis are made", 10)
    deployment = await world.get("Deployment", "q-scheduler")
    assert deployment is not None
    template = deployment["spec"]["template"]
    pod = {"metadata": {**template["metadata"], "name": "asked"}, "spec": template["spec"]}
    await post(api_server, f"{path}/pods?dryRun=All", pod)


async def test_a_quota_that_counts_what_sidecars_do_not_name_is_mended_by_what_the_message_says(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    path = await count(world, api_server, **{"limits.cpu": "100"})

    def want_cpu(spec: Any) -> None:
        spec["prefillPools"][0]["resources"] = {"cpu": "1"}

    async def undo() -> None:
        defaults = {"type": "Container", "default": {"cpu": "1"}}
        limits = {"metadata": {"name": "defaults"}, "spec": {"limits": [defaults]}}
        await post(api_server, f"{path}/limitranges", limits)

    await world.apply(want_cpu)
    await refused_then_made(world, "QuotaExceeded", "give the namespace a LimitRange with defaults", undo)


async def test_a_limit_range_is_told_as_one(world: PlayedWorld, api_server: ApiServer) -> None:
    path = f"/api/v1/namespaces/{world.namespace}/limitranges"
    limits = {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]}
    await post(api_server, path, {"metadata": {"name": "small"}, "spec": limits})

    def want_memory(spec: Any) -> None:
        spec["prefillPools"][0]["resources"] = {"memory": "2Gi"}

    async def undo() -> None:
        api_server.request("DELETE", f"{path}/small")

    await world.apply(want_memory)
    await refused_then_made(
        world, "LimitRangeExceeded", "maximum memory usage per Container is 1Gi, but limit is 2Gi", undo
    )


async def test_a_priority_class_that_is_not_there_is_told(world: PlayedWorld, api_server: ApiServer) -> None:
    def want_class(spec: Any) -> None:
        template = {"spec": {"priorityClassName": f"gold-{world.namespace}"}}
        spec["prefillPools"][0]["podTemplate"] = template

    async def undo() -> None:
        body = {"metadata": {"name": f"gold-{world.namespace}"}, "value": 5}
        await post(api_server, "/apis/scheduling.k8s.io/v1/priorityclasses", body)

    await world.apply(want_class)
    await refused_then_made(world, "ReferenceMissing", "no PriorityClass with name gold-", undo)


async def test_a_webhook_that_does_not_answer_is_told_and_not_taken_for_a_fault_of_the_api_server(
    world: PlayedWorld, api_server: ApiServer
) -> None:
    await restrict(world, {"test": world.namespace})
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    hook = {
        "name": "pods.example.org",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 1,
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "namespaceSelector": {"matchLabels": {"test": world.namespace}},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        ],
    }
    await post(api_server, path, {"metadata": {"name": world.namespace}, "webhooks": [hook]})

    async def undo() -> None:
        api_server.request("DELETE", f"{path}/{world.namespace}")

    await world.apply()
    await refused_then_made(world, "WebhookUnavailable", 'failed calling webhook "pods.example.org"', undo)


# -- names, references, contents


def pool_object(world: PlayedWorld, kind: str, name: str) -> Object:
    return {
        "apiVersion": PREFILL_POOL.api_version,
        "kind": kind,
        "metadata": {"name": name, "namespace": world.namespace},
        "spec": {"clusterRef": {"name": "q"}},
    }


async def test_two_pools_of_one_name_are_told_apart_by_age_and_the_younger_must_be_renamed(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    await world.client.create(pool_object(world, PREFILL_POOL.kind, "extra"), manager="test")
    await world.step()
    younger = await world.client.create(pool_object(world, DECODE_POOL.kind, "q-prefill"), manager="test")
    taken = await turns(world, "Available", "False", DECODE_POOL.kind, "q-prefill")
    assert taken["reason"] == "PoolNameTaken"
    ready = await world.condition("Ready")
    assert ready["reason"] == "PoolNameTaken"
    assert "MooncakeDecodePool q-prefill" in ready["message"]
    assert "rename it" in ready["message"]
    assert await world.pods("prefill") == ["extra-p-0", "q-prefill-p-0", "q-prefill-p-1"], "the others go on"
    await is_quiet(world)
    await world.client.delete(DECODE_POOL, world.namespace, "q-prefill", uid=uid_of(younger))
    await turns(world, "Ready", "True")


async def test_a_pool_with_a_name_of_the_clusters_own_objects_is_refused_and_leaves_them_alone(
    world: PlayedWorld,
) -> None:
    """Its Redis and its masters are planned, its budgets and Services named, like pools."""

    def own_redis(spec: Any) -> None:
        spec["scheduler"]["redis"] = {"managed": {}}

    await world.bring_up(own_redis)
    pods = await world.nodes.pods()
    for name in ("q-redis", "q-kv-master", "q-scheduler"):
        await world.client.create(pool_object(world, DECODE_POOL.kind, name), manager="test")
    await turns(world, "Ready", "False")
    for name in ("q-redis", "q-kv-master", "q-scheduler"):
        taken = await world.condition("Available", DECODE_POOL.kind, name)
        assert (taken["status"], taken["reason"]) == ("False", "PoolNameTaken")
        assert "rename it" in taken["message"]
    assert (await world.nodes.pods()).keys() == pods.keys()
    await is_quiet(world)


async def test_two_standalone_pools_of_one_name_leave_the_older_in_peace(world: PlayedWorld) -> None:
    await world.bring_up()
    await world.client.create(pool_object(world, DECODE_POOL.kind, "extra"), manager="test")
    await turns(world, "Ready", "True")
    await world.until(lambda: _has(world, "extra-d-0"), "the older has its Pod")
    await world.client.create(pool_object(world, PREFILL_POOL.kind, "extra"), manager="test")
    younger = PREFILL_POOL.kind if await _is_younger(world) else DECODE_POOL.kind
    taken = await turns(world, "Available", "False", younger, "extra")
    assert taken["reason"] == "PoolNameTaken"
    assert "has the same name and was there before; rename one of them" in taken["message"]


async def _has(world: PlayedWorld, pod: str) -> bool:
    return pod in await world.nodes.pods()


async def _is_younger(world: PlayedWorld) -> bool:
    """Time stamps are whole seconds: within one, the kind decides."""
    prefill, decode = await world.get(PREFILL_POOL.kind, "extra"), await world.get(DECODE_POOL.kind, "extra")
    assert prefill is not None
    assert decode is not None
    stamps = [pool["metadata"]["creationTimestamp"] for pool in (prefill, decode)]
    return (stamps[0], PREFILL_POOL.kind) > (stamps[1], DECODE_POOL.kind)


async def test_a_foreign_pool_of_an_inline_name_gets_no_pods_and_the_cluster_says_so(
    world: PlayedWorld,
) -> None:
    foreign = await world.client.create(pool_object(world, PREFILL_POOL.kind, "q-prefill"), manager="test")
    await world.apply()
    for _ in range(3):
        await world.step()
    ready = await world.condition("Ready")
    assert ready["reason"] == "PoolNameTaken"
    assert "MooncakePrefillPool q-prefill exists and is not this cluster's" in ready["message"]
    assert await world.pods("prefill") == [], "its uid is not lent to the inline pool"
    await is_quiet(world)
    await world.client.delete(PREFILL_POOL, world.namespace, "q-prefill", uid=uid_of(foreign))
    await world.until(lambda: _has(world, "q-prefill-p-0"), "the inline pool has its name")


def secret(world: PlayedWorld, name: str, key: str, text: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": world.namespace},
        "stringData": {key: text},
    }


@pytest.mark.parametrize("text", ["hunter2:6379", "hunter2", "redis://host:hunter2"])
async def test_a_redis_url_that_cannot_be_used_is_told_without_its_words(
    world: PlayedWorld, text: str
) -> None:
    def external(spec: Any) -> None:
        spec["scheduler"]["redis"] = {"secretRef": {"name": "redis"}}

    await world.client.create(secret(world, "redis", "url", text), manager="test")
    await world.apply(external)
    await world.step()
    ready = await world.condition("Ready")
    assert ready["reason"] == "ReferenceInvalid"
    assert (
        f"spec.scheduler.redis.secretRef: the key url of Secret redis in namespace {world.namespace}"
        in (ready["message"])
    )
    assert "write redis://" in ready["message"]
    everything = str(await world.get("MooncakeCluster", "q")) + str(
        await world.client.list_all(EVENT, world.namespace)
    )
    assert "hunter2" not in everything
    live = await world.client.get(SECRET, world.namespace, "redis")
    await world.client.patch(
        SECRET,
        world.namespace,
        name_of(live),
        {"stringData": {"url": "redis://:p@redis:6379/0"}},
        how="merge",
        manager="test",
    )
    await world.step()
    assert (await world.condition("Ready"))["reason"] != "ReferenceInvalid"


async def test_keys_that_are_no_object_are_told(world: PlayedWorld) -> None:
    def want_keys(spec: Any) -> None:
        spec["scheduler"]["auth"] = {"apiKeySecretRef": {"name": "keys", "key": "all.json"}}

    await world.client.create(secret(world, "keys", "all.json", "[1]"), manager="test")
    await world.apply(want_keys)
    await world.step()
    ready = await world.condition("Ready")
    assert ready["reason"] == "ReferenceInvalid"
    assert "spec.scheduler.auth.apiKeySecretRef: the key all.json of Secret keys" in ready["message"]
    assert "write a JSON object of name → key into it" in ready["message"]


async def test_a_spec_that_can_no_longer_be_used_is_told_and_what_runs_goes_on(world: PlayedWorld) -> None:
    await world.bring_up()

    def contradict(spec: Any) -> None:
        spec["prefillPools"][0]["podTemplate"] = {"spec": {"hostNetwork": True}}

    await world.apply(contradict)
    await world.step()
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "spec.prefillPools[0].podTemplate.spec.hostNetwork: must not be set" in ready["message"]
    assert await world.pods("prefill") == ["q-prefill-p-0", "q-prefill-p-1"]
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    assert cluster["status"]["prefill"] == "2/2"
    # The schedulers are asked with their token all the same: or they would be said to be out of reach.
    known = set(world.scheduler.tokens)
    world.scheduler.tokens.clear()
    await world.step()
    assert world.scheduler.tokens == known
    await world.apply()
    await turns(world, "Ready", "True")


async def test_a_redis_whose_password_was_made_anew_is_made_anew(world: PlayedWorld) -> None:
    """Schedulers and sidecars read the Secret when they connect, Redis when it starts."""

    def own_redis(spec: Any) -> None:
        spec["scheduler"]["redis"] = {"managed": {}}

    await world.bring_up(own_redis)
    (before,) = (await world.uids("redis")).values()
    secret = await world.get("Secret", "q-redis")
    assert secret is not None
    await world.client.delete(SECRET, world.namespace, "q-redis", uid=uid_of(secret))

    async def is_another() -> bool:
        made = await world.get("Secret", "q-redis")
        return (
            made is not None
            and made["data"]["password"] != secret["data"]["password"]
            and before not in (await world.uids("redis")).values()
            and await world.is_ready()
        )

    await world.until(is_another, "Redis knows the new password", 20)
    (after,) = (await world.uids("redis")).values()
    for _ in range(3):
        await world.step()
    assert list((await world.uids("redis")).values()) == [after]


async def test_a_second_store_is_refused_and_takes_nothing_from_the_cluster(world: PlayedWorld) -> None:
    await world.bring_up()
    store = {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeKVCachePool",
        "metadata": {"name": "another", "namespace": world.namespace},
        "spec": {"clusterRef": {"name": "q"}, "replicas": 1, "segmentSize": "1Gi"},
    }
    await world.client.apply(store, manager="kubectl", force=True)
    await world.step()
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert ready["message"].startswith("MooncakeKVCachePool another: more than one store")
    refused = await world.condition("Available", "MooncakeKVCachePool", "another")
    assert (refused["status"], refused["reason"]) == ("False", "InvalidSpec")
    # Everything else goes on.
    await world.scale(3)

    async def has_grown() -> bool:
        return len(await world.routable("decode")) == 3

    await world.until(has_grown, "the pool has grown", 20)


async def test_a_store_in_use_that_can_no_longer_be_used_keeps_all_as_it_is(world: PlayedWorld) -> None:
    """To plan without it would replace all engines, and take its master from those that still run."""
    store = pool_object(world, KV_CACHE_POOL.kind, "own")
    store["spec"] |= {"replicas": 1, "segmentSize": "1Gi", "ssd": {"size": "1Ti", "path": "/data/kv"}}

    def without(spec: Any) -> None:
        spec["kvCachePools"] = []

    def real(spec: Any) -> None:
        without(spec)
        spec["engine"] = {"type": "vLLM", "image": "vllm/vllm-openai:v0.33.0"}
        spec["model"] = {
            "name": "m",
            "path": "/models/m",
            "volume": {"persistentVolumeClaim": {"claimName": "m"}},
        }

    async def what_runs() -> set[tuple[str, str, str]]:
        kinds = (POD, BY_KIND["Service"], BY_KIND["PodDisruptionBudget"])
        return {
            (obj["kind"], name_of(obj), uid_of(obj))
            for kind in kinds
            for obj in await world.client.list_all(kind, world.namespace)
        }

    await world.client.apply(store, manager="kubectl", force=True)
    await world.bring_up(without)
    before = await what_runs()
    unusable = {"spec": {"hostNetwork": True}}
    wrong: list[tuple[Callable[[Any], None], Object, str]] = [
        (lambda spec: None, {}, "more than one store in a cluster is not yet supported; remove it, or q-kv"),
        (real, {}, "ssd is not yet supported with real engines; remove it"),
        (without, {"podTemplate": unusable}, "podTemplate.spec.hostNetwork: must not be set"),
    ]
    for cluster, change, said in wrong:
        await world.client.apply(
            {**store, "spec": {**store["spec"], **change}}, manager="kubectl", force=True
        )
        await world.apply(cluster)
        ready = await turns(world, "Ready", "False")
        assert ready["reason"] == "InvalidSpec"
        assert ready["message"].startswith("MooncakeKVCachePool own: ")
        assert said in ready["message"]
        for _ in range(3):
            await world.step()
        assert await what_runs() == before
        await is_quiet(world)
        await world.client.apply(store, manager="kubectl", force=True)
        await world.apply(without)
        await turns(world, "Ready", "True")
        assert await what_runs() == before


async def test_a_pool_that_is_scaled_long_after_its_last_rollout_has_its_deadline_before_it(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    await later(world, 4000)
    await world.scale(3)
    await world.reconcile()
    await world.reconcile()
    progressing = await world.condition("Progressing", DECODE_POOL.kind, "q-decode")
    assert (progressing["status"], progressing["reason"]) == ("True", "Scaling")


async def test_scaling_down_is_no_news_of_anything_bad(world: PlayedWorld) -> None:
    await world.bring_up()
    for in_flight in (1, 0):
        world.scheduler.instances["q-decode-d-1"]["in_flight"] = in_flight
        await world.scale(1)
        await world.step()
        assert (await world.condition("Available", "MooncakeDecodePool", "q-decode"))["status"] == "True"
        assert await world.is_ready()
    events = await world.client.list_all(EVENT, world.namespace)
    assert not [event for event in events if event["type"] == "Warning"]


async def test_a_pod_that_lost_its_label_is_told_of_for_it_has_a_name_that_is_wanted(
    world: PlayedWorld,
) -> None:
    async def label(value: str | None) -> None:
        body = {"metadata": {"labels": {"mooncake.io/cluster": value}}}
        await world.client.patch(POD, world.namespace, "q-decode-d-1", body, how="merge", manager="kubectl")

    await world.bring_up()
    (before,) = [uid for name, uid in (await world.uids("decode")).items() if name == "q-decode-d-1"]
    await label(None)
    degraded = await turns(world, "Degraded", "True", DECODE_POOL.kind, "q-decode")
    assert degraded["reason"] == "NameTaken"
    assert "put it back, or delete the Pod" in degraded["message"]
    await is_quiet(world)
    await label("q")
    await turns(world, "Ready", "True")
    assert (await world.uids("decode"))["q-decode-d-1"] == before


async def test_a_cluster_that_was_deleted_and_applied_again_waits_for_what_still_ends(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    cluster = await world.get("MooncakeCluster", "q")
    assert cluster is not None
    world.scheduler.instances["q-decode-d-1"]["in_flight"] = 1
    await world.client.delete(CLUSTER, world.namespace, "q", uid=uid_of(cluster))
    await world.apply()

    async def is_told() -> bool:
        ready = await world.condition("Ready")
        said = "MooncakeDecodePool q-decode exists and is not this cluster's; it is being deleted"
        return ready.get("reason") == "NameTaken" and said in ready["message"]

    await world.until(is_told, "it says what it waits for", 20)
