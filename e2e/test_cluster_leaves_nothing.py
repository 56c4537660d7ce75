"""Whatever becomes of a cluster's driver, the machine ends as it was."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import leftovers, processes
from e2e.cluster.cluster import Cluster, Options
from e2e.cluster.errors import ClusterError

ROOT = Path(__file__).resolve().parent.parent
_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="starting a cluster needs root"),
    pytest.mark.skipif(
        bool(os.environ.get("E2E_KUBECONFIG")),
        reason="the tests run against a cluster that they did not start",
    ),
    pytest.mark.timeout(1200, func_only=True),
]


def machine() -> dict[str, str]:
    """All that a cluster might change on this machine."""

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    # Other clusters' Pods come and go.
    mounts = [point for point in points if "/mooncake-clusters/" not in point or "/spare/" in point]
    parameters = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    found = {name: Path("/proc/sys", name).read_text() for name in parameters}
    return found | {
        "hugepages": _HUGEPAGES.read_text(),
        "mounts": "\n".join(sorted(mounts)),
        # Other clusters come and go as well.
        "network namespaces": "\n".join(
            line for line in output("ip", "netns", "list").splitlines() if "spare" in line
        ),
        "links": "\n".join(sorted(line.split(":")[1] for line in output("ip", "-o", "link").splitlines())),
        "routes": output("ip", "route"),
        "rules": output("nft", "list", "ruleset"),
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "cgroups": "\n".join(sorted(map(str, Path("/sys/fs/cgroup").glob("*/mooncake-spare*")))),
        "sockets": "\n".join(sorted(filter(is_deserted, map(str, Path("/run/containerd").glob("s/*"))))),
        "container logs": "\n".join(sorted(map(str, Path("/var/log/containers").glob("*spare*")))),
        "pod logs": "\n".join(sorted(map(str, Path("/var/log/pods").glob("*")))),
    }


def is_deserted(path: str) -> bool:
    """Whether a socket is left over: nobody answers there."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # it has gone meanwhile
        return False


@pytest.fixture
def spare() -> Iterator[Cluster]:
    """A second cluster beside the tests' own; removed whatever happens."""
    cluster = Cluster("spare")
    cluster.stop()
    yield cluster
    cluster.stop()


def say(text: str) -> None:
    print(text, file=sys.stderr)


def test_a_stopped_cluster_with_pods_and_hugepages_leaves_the_machine_as_it_was(spare: Cluster) -> None:
    before = machine()
    spare.start(say, Options(hugepages_2mi=16))
    allocatable = spare.kubectl(
        "get", "nodes", "-o", r"jsonpath={.items[0].status.allocatable.hugepages-2Mi}"
    )
    spare.kubectl("run", "pause", "--image=localhost/mooncake-e2e-pause:1", "--image-pull-policy=Never")
    spare.kubectl("wait", "pod/pause", "--for=condition=Ready", "--timeout=180s")

    spare.stop()

    assert allocatable == f"{(int(before['hugepages']) + 16) * 2}Mi"
    assert leftovers.traces(spare.layout) == []
    assert machine() == before


def test_a_start_removes_what_a_killed_driver_left(spare: Cluster) -> None:
    before = machine()
    driver = subprocess.Popen(
        [sys.executable, "-m", "e2e.cluster", "up", "--name", "spare", "--no-images"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not any("kubelet" in line for line in processes.of_cluster(spare.layout).values()):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    orphans = set(processes.of_cluster(spare.layout))

    spare.start(say)
    survivors = orphans & set(processes.of_cluster(spare.layout))
    is_running = spare.is_running()
    spare.stop()

    assert orphans
    assert not survivors
    assert is_running
    assert leftovers.traces(spare.layout) == []
    assert machine() == before


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(spare: Cluster) -> None:
    before = machine()

    with pytest.raises(ClusterError, match=r"(?s)kube-apiserver ended with 1.*unknown flag: --no-such-flag"):
        spare.start(say, Options(arguments={"kube-apiserver": ["--no-such-flag"]}))

    assert leftovers.traces(spare.layout) == []
    assert machine() == before


def test_a_killed_api_server_comes_back_with_what_it_knew(spare: Cluster) -> None:
    spare.start(say)
    spare.kubectl("create", "configmap", "kept")

    spare.restart("kube-apiserver")

    processes.wait_until("the API server is back", spare.is_running, 60)
    assert "kept" in spare.kubectl("get", "configmaps", "-o", "name")
