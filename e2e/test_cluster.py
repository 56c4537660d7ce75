"""The cluster is what later tests take it for: a real one."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.kube import Kube, KubeError, eventually, is_true
from e2e.under_test import ClusterUnderTest

ROOT = Path(__file__).resolve().parent.parent

_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def a_pod(name: str, image: str, command: list[str], **more: Any) -> dict[str, Any]:
    """A Pod that the strictest Pod Security level admits."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": _RESTRICTED,
        **more,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1},
    }


async def output_of(kube: Kube, namespace: str, pod: dict[str, Any]) -> str:
    """Run a Pod to its end; what it printed."""
    name = pod["metadata"]["name"]
    await kube.apply_all([pod], namespace)

    async def has_succeeded() -> bool:
        found = await kube.get("Pod", name, namespace)
        phase = found["status"].get("phase")
        assert phase != "Failed", await kube.logs(name, namespace)
        return bool(phase == "Succeeded")

    await eventually(f"{name} succeeds", has_succeeded)
    return await kube.logs(name, namespace)


async def test_every_node_is_ready(kube: Kube) -> None:
    nodes = await kube.list_all("Node")

    assert nodes
    assert all(is_true(node, "Ready") for node in nodes)


async def test_the_products_image_runs_unprivileged_on_a_read_only_root(
    kube: Kube, namespace: str, cluster: ClusterUnderTest
) -> None:
    await kube.patch(
        "Namespace", namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    rooms = "mooncake_scheduler, mooncake_sidecar, mooncake_simulator"
    says_who = f"import os, {rooms}; print(os.getuid(), mooncake_scheduler.__name__)"
    pod = a_pod("product", cluster.image("mooncake"), ["python", "-c", says_who])

    assert (await output_of(kube, namespace, pod)).split() == ["65532", "mooncake_scheduler"]


async def test_the_operators_image_holds_the_operator_and_no_scheduler(
    kube: Kube, namespace: str, cluster: ClusterUnderTest
) -> None:
    probe = "import kopf, mooncake_operator; import importlib.util as u; print(u.find_spec('fastapi'))"
    pod = a_pod("operator", cluster.image("operator"), ["python", "-c", probe])

    assert (await output_of(kube, namespace, pod)).strip() == "None"


async def test_a_simulated_engine_answers_through_a_service_inside_and_from_the_test(
    kube: Kube, namespace: str, cluster: ClusterUnderTest
) -> None:
    engine = a_pod(
        "engine",
        cluster.image("mooncake"),
        ["python", "-m", "mooncake_simulator.engine"],
        args=["--model", "m", "--host", "0.0.0.0", "--port", "8000", "--profile", "llama3-70b-8xa800"],
        readinessProbe={"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "engine"},
        "spec": {"selector": {"app": "engine"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    await kube.apply_all([engine, service], namespace)

    async def is_ready() -> bool:
        return is_true(await kube.get("Pod", "engine", namespace), "Ready")

    await eventually("the engine is Ready", is_ready)
    asks = (
        f"import urllib.request as u; print(u.urlopen('http://engine.{namespace}/v1/models').read().decode())"
    )
    inside = await output_of(
        kube, namespace, a_pod("client", cluster.image("mooncake"), ["python", "-c", asks])
    )
    async with (
        cluster.forward(kube, "engine", namespace, 80) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        outside = await client.get("/v1/models")

    assert '"m"' in inside
    assert outside.json()["data"][0]["id"] == "m"


async def test_kubectl_executes_in_a_pod(kube: Kube, namespace: str, cluster: ClusterUnderTest) -> None:
    sleeps = a_pod("sleeps", cluster.image("mooncake"), ["python", "-c", "import time; time.sleep(600)"])
    await kube.apply_all([sleeps], namespace)

    async def runs() -> bool:
        return bool((await kube.get("Pod", "sleeps", namespace))["status"].get("phase") == "Running")

    await eventually("the Pod runs", runs)

    said = await cluster.kubectl("exec", "-n", namespace, "sleeps", "--", "python", "-c", "print('here')")
    assert said.strip() == "here"


async def test_the_redis_image_serves(kube: Kube, namespace: str, cluster: ClusterUnderTest) -> None:
    pod = a_pod("redis", cluster.redis_image, ["redis-server", "--version"])
    pod["spec"]["securityContext"] = {"runAsUser": 65532}

    assert "Redis server" in await output_of(kube, namespace, pod)


async def test_the_crds_are_established(kube: Kube, crds: list[str]) -> None:
    assert crds
    for name in crds:
        assert is_true(await kube.get("CustomResourceDefinition", name), "Established"), name


def the_quickstart() -> dict[str, Any]:
    """The example as a user applies it."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    return loaded


async def test_the_quickstart_is_accepted(kube: Kube, namespace: str, crds: list[str]) -> None:
    (applied,) = await kube.apply_all([the_quickstart()], namespace)

    assert applied["spec"]["prefillPools"][0]["replicas"] == 2
    assert await kube.list_all("MooncakeCluster", namespace)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "engine", "type"), "SGLang", "SGLang is not yet supported; write vLLM or Simulated"),
        (
            ("spec", "engine"),
            {"type": "vLLM"},
            "is required for vLLM; write a container image, e.g. vllm/vllm-openai:v0.33.0",
        ),
        (("spec", "network"), {"protocol": "RDMA"}, "RDMA is not yet supported; write TCP"),
        (
            ("spec", "slo", "ttft"),
            {"percentile": 90},
            'needs either target or multiplier; write target: 2s, or multiplier: "10"',
        ),
        (
            ("spec", "engine", "simulated", "profile"),
            "abacus",
            "is not a known profile; write one of llama3-70b-8xa800",
        ),
    ],
)
async def test_a_bad_cluster_is_refused_with_what_to_write(
    kube: Kube, namespace: str, crds: list[str], path: tuple[str, ...], value: object, message: str
) -> None:
    manifest = the_quickstart()
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    with pytest.raises(KubeError) as refused:
        await kube.apply_all([manifest], namespace)

    assert refused.value.status == 422
    assert message in refused.value.message


async def test_a_misspelt_field_is_named(
    kube: Kube, namespace: str, crds: list[str], cluster: ClusterUnderTest
) -> None:
    manifest = the_quickstart()
    manifest["spec"]["decodePool"] = []

    with pytest.raises(Exception, match="decodePool"):
        await cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))
