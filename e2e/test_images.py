"""Each image has what its component needs, and runs as the strictest Pod Security level demands."""

import sys
from typing import Any

import pytest

from e2e.cluster import images
from e2e.kube import Kube, eventually
from e2e.under_test import ClusterUnderTest

_COMMANDS = {
    "operator": ["python", "-c", "import mooncake_operator, kopf, kubernetes.aio"],
    "scheduler": ["python", "-m", "mooncake_scheduler", "--help"],
    "sidecar": ["python", "-c", "import mooncake_sidecar.engine.__main__"],
    "simulator": [
        "sh",
        "-c",
        "python -m mooncake_simulator.engine --help && python -m mooncake_simulator.store -h",
    ],
    "mooncake": [
        "sh",
        "-ec",
        "for room in mooncake_scheduler mooncake_simulator.engine mooncake_simulator.store; do"
        " python -m $room --help; done; python -c 'import mooncake_sidecar.engine.__main__'",
    ],
}


@pytest.fixture(scope="module")
def every_image(cluster: ClusterUnderTest) -> None:
    """Build and load those that no other test needs: a build may wait, and a test has its own time limit."""
    if cluster.takes_images:
        for archive in images.build(_say, [target for target in _COMMANDS if target not in images.TARGETS]):
            cluster.load(archive)


@pytest.mark.usefixtures("every_image")
@pytest.mark.parametrize("target", _COMMANDS)
async def test_an_image_runs_its_component_unprivileged(
    cluster: ClusterUnderTest, kube: Kube, namespace: str, target: str
) -> None:
    enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
    await kube.patch("Namespace", namespace, {"metadata": {"labels": enforced}})
    await kube.apply_all([_a_pod(cluster.image(target), _COMMANDS[target])], namespace)

    async def has_ended() -> bool:
        return (await kube.get("Pod", "component", namespace))["status"].get("phase") in (
            "Succeeded",
            "Failed",
        )

    await eventually("the component's program ends", has_ended)
    pod = await kube.get("Pod", "component", namespace)
    assert pod["status"]["phase"] == "Succeeded", await kube.logs("component", namespace)


def _a_pod(image: str, command: list[str]) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "component"}, "spec": spec}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
