"""Played nodes look to the control plane like nodes."""

from typing import Any

import pytest

from e2e.kube import Kube, eventually, is_true
from e2e.played_kubelet import (
    Behaviour,
    Exits,
    ImageMissing,
    NeverReady,
    NodePressure,
    NodeShape,
    PlayedNodes,
)

_TAINTED = NodeShape(taint=True)
_TOLERATES = [{"key": "mooncake.io/played", "operator": "Exists"}]


def a_deployment(replicas: int, **pod_spec: Any) -> dict[str, Any]:
    """Pods that only played nodes take, for nobody else has so many GPUs."""
    container = {"name": "main", "image": "anything", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "played"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "played"}},
            "template": {
                "metadata": {"labels": {"app": "played"}},
                "spec": {"containers": [container], "tolerations": _TOLERATES, **pod_spec},
            },
        },
    }


def a_pod(name: str, **spec: Any) -> dict[str, Any]:
    (template,) = [a_deployment(1, **spec)["spec"]["template"]]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}


async def test_pods_of_a_deployment_become_ready_and_go(kube: Kube, namespace: str) -> None:
    async with PlayedNodes(kube, 5, shape=_TAINTED):
        await kube.apply_all([a_deployment(40)], namespace)

        async def is_ready() -> bool:
            found = await kube.get("Deployment", "played", namespace)
            return bool(found["status"].get("readyReplicas") == 40)

        await eventually("40 Pods are ready", is_ready)
        pods = await kube.list_all("Pod", namespace)
        await kube.delete("Deployment", "played", namespace)

        async def are_gone() -> bool:
            return not await kube.list_all("Pod", namespace)

        await eventually("the Pods are gone", are_gone)

    assert len({pod["spec"]["nodeName"] for pod in pods}) == 5
    assert len({pod["status"]["podIP"] for pod in pods}) == 40
    assert not [
        node for node in await kube.list_all("Node") if node["metadata"]["name"].startswith("played-")
    ]


async def test_a_readiness_gate_keeps_a_pod_from_being_ready(kube: Kube, namespace: str) -> None:
    gated = a_pod("gated", readinessGates=[{"conditionType": "mooncake.io/routable"}])
    opened = {"status": {"conditions": [{"type": "mooncake.io/routable", "status": "True"}]}}

    async with PlayedNodes(kube, 1, shape=_TAINTED):
        await kube.apply_all([gated], namespace)

        async def has_containers() -> bool:
            return is_true(await kube.get("Pod", "gated", namespace), "ContainersReady")

        async def is_ready() -> bool:
            return is_true(await kube.get("Pod", "gated", namespace), "Ready")

        await eventually("the containers are ready", has_containers)
        closed = await is_ready()
        await kube.patch("Pod", "gated", opened, namespace, how="strategic", subresource="status")
        await eventually("the Pod is Ready", is_ready)

    assert not closed


class _Crossing:
    """A client through which a gate is opened, and seen to be, while the kubelet writes that it is closed."""

    def __init__(self, kube: Kube, body: dict[str, Any]) -> None:
        self._kube = kube
        self._body = body
        self.played: PlayedNodes | None = None
        self.crossed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    async def patch(self, kind: str, name: str, body: Any, *rest: Any, **how: Any) -> Any:
        answer = await self._kube.patch(kind, name, body, *rest, **how)
        if kind == "Pod" and not self.crossed:
            self.crossed = True
            await self._kube.patch(kind, name, self._body, *rest, **how)
            await eventually("the kubelet sees the gate open", self._is_seen)
        return answer

    async def _is_seen(self) -> bool:
        assert self.played is not None
        return any(is_true(pod, "mooncake.io/routable") for pod, _ in self.played.pods())


async def test_a_gate_that_opens_while_the_kubelet_writes_is_not_overlooked(
    kube: Kube, namespace: str
) -> None:
    gated = a_pod("gated", readinessGates=[{"conditionType": "mooncake.io/routable"}], nodeName="played-0")
    crossing = _Crossing(
        kube, {"status": {"conditions": [{"type": "mooncake.io/routable", "status": "True"}]}}
    )
    async with PlayedNodes(crossing, 1, shape=_TAINTED) as played:  # type: ignore[arg-type]
        crossing.played = played
        await kube.apply_all([gated], namespace)

        async def is_ready() -> bool:
            return is_true(await kube.get("Pod", "gated", namespace), "Ready")

        await eventually("the Pod is Ready", is_ready)
    assert crossing.crossed


async def _state_of(kube: Kube, namespace: str, name: str) -> tuple[str, str, int, bool]:
    pod = await kube.get("Pod", name, namespace)
    status = pod["status"]
    (container,) = status.get("containerStatuses") or [{"state": {}, "restartCount": 0}]
    waiting = container["state"].get("waiting", {}).get("reason", "")
    return status.get("phase", ""), waiting, container["restartCount"], is_true(pod, "Ready")


@pytest.mark.parametrize(
    ("behaviour", "restarts", "expected"),
    [
        (Behaviour(fault=ImageMissing()), "Always", ("Pending", "ErrImagePull", 0, False)),
        (Behaviour(fault=NeverReady()), "Always", ("Running", "", 0, False)),
        (Behaviour(fault=NodePressure()), "Always", ("Failed", "", 0, False)),
        (Behaviour(fault=Exits(times=2, backoff_s=0.2)), "Always", ("Running", "", 2, True)),
        (Behaviour(fault=Exits()), "Never", ("Failed", "", 0, False)),
        (Behaviour(start_s=0.5, ready_s=0.5), "Always", ("Running", "", 0, True)),
    ],
    ids=["image missing", "never ready", "evicted", "crashes twice", "fails for good", "slow"],
)
async def test_a_script_decides_what_becomes_of_a_pod(
    kube: Kube,
    namespace: str,
    behaviour: Behaviour,
    restarts: str,
    expected: tuple[str, str, int, bool],
) -> None:
    async with PlayedNodes(kube, 1, script=lambda _: behaviour, shape=_TAINTED):
        await kube.apply_all([a_pod("scripted", restartPolicy=restarts)], namespace)

        async def is_as_scripted() -> bool:
            found = await _state_of(kube, namespace, "scripted")
            assert found == expected
            return True

        await eventually("the Pod is as scripted", is_as_scripted)


async def test_a_pod_that_never_ends_outlives_its_grace_period(kube: Kube, namespace: str) -> None:
    async with PlayedNodes(kube, 1, script=lambda _: Behaviour(stop_s=None), shape=_TAINTED):
        await kube.apply_all([a_pod("stuck", terminationGracePeriodSeconds=1)], namespace)

        async def is_ready() -> bool:
            return is_true(await kube.get("Pod", "stuck", namespace), "Ready")

        await eventually("the Pod is Ready", is_ready)
        await kube.delete("Pod", "stuck", namespace)
        with pytest.raises(AssertionError):
            await eventually("the Pod is gone", lambda: _is_gone(kube, "stuck", namespace), within_s=4)

    assert await _is_gone(kube, "stuck", namespace)


async def test_a_vanished_node_is_noticed_and_its_pods_replaced(kube: Kube, namespace: str) -> None:
    async with PlayedNodes(kube, 2, shape=_TAINTED) as played:
        await kube.apply_all([a_deployment(2)], namespace)

        async def ready_nodes() -> set[str]:
            pods = await kube.list_all("Pod", namespace)
            return {
                pod["spec"]["nodeName"]
                for pod in pods
                if is_true(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]
            }

        async def both_serve() -> bool:
            return len(await ready_nodes()) == 2

        await eventually("Pods run on both nodes", both_serve)
        lost, kept = played.names
        played.vanish(lost)

        async def has_moved() -> bool:
            found = await kube.get("Deployment", "played", namespace)
            return bool(await ready_nodes() == {kept} and found["status"].get("readyReplicas") == 2)

        await eventually("the Pods are replaced on the other node", has_moved)
        left = await kube.list_all("Pod", namespace, fields=f"spec.nodeName={lost}")
        await played.come_back(lost)

        async def is_clean() -> bool:
            return is_true(await kube.get("Node", lost), "Ready") and not await kube.list_all(
                "Pod", namespace, fields=f"spec.nodeName={lost}"
            )

        await eventually("the node is back and drops what was deleted", is_clean)

    assert len(left) == 1


async def _is_gone(kube: Kube, name: str, namespace: str) -> bool:
    return await kube.find("Pod", name, namespace) is None
