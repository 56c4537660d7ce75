"""What real kubelets, schedulers and controllers refuse ends in a condition that says it, and heals."""

import json
from typing import Any

import aiohttp
import pytest

from e2e.installation import Operator
from e2e.kube import Kube, condition, eventually, is_true

POOL = ("MooncakePrefillPool", "t-prefill")

pytestmark = pytest.mark.timeout(1200, func_only=True)


def cluster(**prefill: Any) -> dict[str, Any]:
    """The smallest cluster that serves; its prefill pool has these fields as well."""
    return {
        "apiVersion": "mooncake.io/v1alpha1",
        "kind": "MooncakeCluster",
        "metadata": {"name": "t"},
        "spec": {
            "model": {"name": "m"},
            "engine": {"type": "Simulated", "simulated": {"profile": "llama3-70b-8xa800", "timeScale": 50}},
            "slo": {"ttft": {"target": "60s"}, "tbt": {"target": "10s"}},
            "prefillPools": [{"name": "prefill", "drain": {"timeoutSeconds": 5}, **prefill}],
            "decodePools": [{"name": "decode", "drain": {"timeoutSeconds": 5}}],
            # Without it a scheduler learns of instances from a ConfigMap, which kubelets bring in a minute.
            "scheduler": {"redis": {"managed": {}}},
        },
    }


def template(**spec: Any) -> dict[str, Any]:
    """A podTemplate with this spec."""
    return {"podTemplate": {"spec": spec}}


async def told(kube: Kube, namespace: str, type_: str, reason: str, *words: str) -> None:
    """Wait until a condition of the prefill pool has this reason and says these words."""

    async def says() -> bool:
        found = condition(await kube.get(*POOL, namespace), type_)
        assert found is not None
        assert found["reason"] == reason, found
        assert all(word in found["message"] for word in words), found["message"]
        return True

    await eventually(f"{type_} says {reason}", says)


async def heals(kube: Kube, namespace: str, type_: str, status: str) -> None:
    """Wait until the condition of the prefill pool is as it should be, by itself."""

    async def has() -> bool:
        found = condition(await kube.get(*POOL, namespace), type_)
        return found is not None and found["status"] == status

    await eventually(f"{type_} is {status} again", has)


async def test_a_cluster_tells_its_latencies_and_is_then_left_alone(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    await kube.apply_all([cluster()], namespace)

    async def ready() -> bool:
        return is_true(await kube.get("MooncakeCluster", "t", namespace), "Ready")

    await eventually("the cluster is Ready", ready)
    async with (
        operator.cluster.forward(kube, "t-scheduler", namespace, 80) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        body = {"model": "m", "prompt": [7] * 500, "max_tokens": 8, "ignore_eos": True, "stream": True}
        for _ in range(25):
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert (await answer.text()).rstrip().endswith("[DONE]")

    async def measured() -> bool:
        return is_true(await kube.get("MooncakeCluster", "t", namespace), "SLOMet")

    await eventually("the targets are said to be kept", measured)
    printed = await operator.cluster.kubectl("get", "mkc", "t", "-n", namespace)
    header, row = printed.splitlines()
    shown = {name: row[header.index(name) :].split()[0] for name in header.split() if name != "KV"}
    assert shown["TTFT"].endswith("s")
    assert shown["TBT"].endswith("s")
    assert (shown["PREFILL"], shown["DECODE"], shown["READY"]) == ("1/1", "1/1", "True")
    assert shown["REASON"] == "PoolsAvailable"
    pool = await kube.get(*POOL, namespace)
    assert {c["type"]: c["status"] for c in pool["status"]["conditions"]} == {
        "Available": "True",
        "Degraded": "False",
        "FabricReady": "True",
        "Progressing": "False",
        "Scheduled": "True",
    }
    events = await kube.list_all("Event", namespace, fields="reportingComponent=mooncake.io/operator")
    assert [event for event in events if event["type"] == "Warning"] == []


async def test_an_image_that_is_nowhere_is_told_with_its_name(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    extra = {"name": "extra", "image": "localhost/nowhere/extra:1", "imagePullPolicy": "IfNotPresent"}
    await kube.apply_all([cluster(**template(containers=[extra]))], namespace)
    await told(
        kube, namespace, "Degraded", "ImageUnavailable", "container extra", "localhost/nowhere/extra:1"
    )


async def test_a_rollout_that_cannot_go_on_says_so_after_its_deadline_while_the_old_revision_serves(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    sound = cluster()
    sound["spec"]["coordination"] = {"rollout": {"progressDeadlineSeconds": 20}}
    await kube.apply_all([sound], namespace)

    async def ready() -> bool:
        return is_true(await kube.get("MooncakeCluster", "t", namespace), "Ready")

    await eventually("the cluster is Ready", ready)
    before = await _prefill_pods(kube, namespace)

    extra = {"name": "extra", "image": "localhost/nowhere/extra:1", "imagePullPolicy": "IfNotPresent"}
    broken = cluster(**template(containers=[extra]))
    broken["spec"]["coordination"] = sound["spec"]["coordination"]
    await kube.apply_all([broken], namespace)
    await told(
        kube,
        namespace,
        "Progressing",
        "DeadlineExceeded",
        "progressDeadlineSeconds",
        "localhost/nowhere/extra:1",
    )
    assert before <= await _prefill_pods(kube, namespace)
    async with (
        operator.cluster.forward(kube, "t-scheduler", namespace, 80) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        body = {"model": "m", "prompt": [7] * 500, "max_tokens": 8, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

    await kube.apply_all([sound], namespace)
    await told(kube, namespace, "Progressing", "Complete")
    assert await _prefill_pods(kube, namespace) == before


async def _prefill_pods(kube: Kube, namespace: str) -> set[str]:
    """Uids of the prefill pool's Pods that were not told to end."""
    pods = await kube.list_all("Pod", namespace, labels="mooncake.io/role=prefill")
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


async def test_a_container_that_crashes_is_told_with_its_exit_code_and_its_last_line(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    extra = {
        "name": "extra",
        "image": operator.cluster.image("mooncake"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", "raise SystemExit('no licence for 3 GPUs')"],
    }
    await kube.apply_all([cluster(**template(containers=[extra]))], namespace)
    words = ("container extra exited with 1, no licence for 3 GPUs", "kubectl logs t-prefill-p-0 --previous")
    await told(kube, namespace, "Degraded", "Crashing", *words)


async def test_a_config_map_that_a_volume_wants_is_told_and_awaited(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    volume = {"name": "tuning", "configMap": {"name": "tuning"}}
    mounted = {"name": "engine", "volumeMounts": [{"name": "tuning", "mountPath": "/tuning"}]}
    spec = template(volumes=[volume], containers=[mounted])
    await kube.apply_all([cluster(**spec)], namespace)
    await told(kube, namespace, "Degraded", "ConfigMissing", 'configmap "tuning" not found')
    await kube.apply_all(
        [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tuning"}, "data": {"a": "b"}}],
        namespace,
    )
    await heals(kube, namespace, "Degraded", "False")


async def test_a_claim_that_is_missing_and_then_without_a_storage_class_is_told(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "models"}}
    await kube.apply_all([cluster(**template(volumes=[volume]))], namespace)
    await told(kube, namespace, "Scheduled", "VolumeMissing", 'persistentvolumeclaim "models" not found')
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "no-such-class",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    await kube.apply_all([claim], namespace)
    words = ("PersistentVolumeClaim models: ", '"no-such-class" not found')
    await told(kube, namespace, "Scheduled", "VolumeUnbound", *words)


@pytest.mark.parametrize(
    ("pool", "reason", "words"),
    [
        ({"resources": {"gpu": {"count": 1}}}, "InsufficientGPU", "Insufficient nvidia.com/gpu"),
        ({"resources": {"memory": "4000Ti"}}, "InsufficientMemory", "Insufficient memory"),
        (
            template(nodeSelector={"no": "where"}),
            "NoMatchingNode",
            "didn't match Pod's node affinity/selector",
        ),
    ],
    ids=["GPU", "memory", "node selector"],
)
async def test_a_pod_that_no_node_takes_is_told_in_the_schedulers_words(
    operator: Operator, kube: Kube, namespace: str, pool: dict[str, Any], reason: str, words: str
) -> None:
    await kube.apply_all([cluster(**pool)], namespace)
    await told(kube, namespace, "Scheduled", reason, "Pod t-prefill-p-0", words)
    await kube.apply_all([cluster()], namespace)
    await heals(kube, namespace, "Scheduled", "True")


async def test_a_pod_security_level_and_a_quota_are_told_and_pods_come_once_they_allow_it(
    operator: Operator, kube: Kube, namespace: str
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    await kube.patch("Namespace", namespace, {"metadata": {"labels": {level: "baseline"}}})
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight"},
        "spec": {"hard": {"pods": "0"}},
    }
    host = {"name": "host", "hostPath": {"path": "/"}}
    await kube.apply_all([cluster(**template(volumes=[host]))], namespace)
    await told(kube, namespace, "Degraded", "PodSecurityForbidden", 'violates PodSecurity "baseline')
    await kube.apply_all([quota], namespace)
    await kube.patch("Namespace", namespace, {"metadata": {"labels": {level: None}}})
    await told(kube, namespace, "Degraded", "QuotaExceeded", "exceeded quota: tight")

    async def said_by_the_scheduler() -> bool:
        ready = condition(await kube.get("MooncakeCluster", "t", namespace), "SchedulerReady")
        return ready is not None and ready["status"] == "True"

    await kube.delete("ResourceQuota", "tight", namespace)
    await heals(kube, namespace, "Degraded", "False")
    await eventually("schedulers come by themselves", said_by_the_scheduler)


async def test_what_is_wrong_is_no_reason_to_hurry(operator: Operator, kube: Kube, namespace: str) -> None:
    """Pods that cannot start for several reasons at once: the operator's passes and writes stay few."""
    spec = template(nodeSelector={"no": "where"})
    document = cluster(**spec)
    document["spec"]["scheduler"]["auth"] = {"apiKeySecretRef": {"name": "keys"}}
    await kube.apply_all([document], namespace)
    await told(kube, namespace, "Scheduled", "NoMatchingNode")

    async def versions() -> list[str]:
        kinds = ("MooncakeCluster", "MooncakePrefillPool", "MooncakeDecodePool")
        found = [await kube.list_all(kind, namespace) for kind in kinds]
        return [obj["metadata"]["resourceVersion"] for objects in found for obj in objects]

    before: list[str] = []

    async def stands_still() -> bool:
        nonlocal before
        last, before = before, await versions()
        return last == before

    await eventually("nothing is written for 10 s", stands_still, every_s=10)
    ready = condition(await kube.get("MooncakeCluster", "t", namespace), "Ready")
    assert ready is not None
    assert ready["reason"] == "ReferenceMissing", json.dumps(ready)
