"""Fixtures of the end-to-end tests.

``E2E_KUBECONFIG`` runs them against a cluster that is there; otherwise one is started for the session and
then removed.
"""

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.cluster import programs
from e2e.installation import Operator
from e2e.kube import Kube
from e2e.under_test import ClusterUnderTest, cluster_under_test

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE_LABEL = "mooncake.io/e2e"

# pytest-asyncio asks for the present loop before each test, and asyncio makes one that nobody closes unless
# it was told that there is none.
asyncio.set_event_loop(None)

_failed = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's time limit is its own: starting the cluster does not count."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember failures, for those who tear down."""
    report = yield
    if report.failed:  # type: ignore[attr-defined]
        item.stash[_failed] = True
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterUnderTest]:
    """A cluster with the project's images in it."""
    with cluster_under_test(lambda text: print(text, file=sys.stderr, flush=True)) as found:
        yield found
        _await_end_of_namespaces(found)


@pytest.fixture(scope="session")
def operator(cluster: ClusterUnderTest) -> Iterator[Operator]:
    """The operator, installed by the chart; uninstalled once the tests' namespaces are gone.

    The CustomResourceDefinitions stay, as with every `helm uninstall`.
    """
    installed = Operator(cluster)
    installed.install()
    yield installed
    # Pools have a finalizer that only an operator takes off.
    _await_end_of_namespaces(cluster)
    installed.uninstall()


@pytest.fixture(autouse=True)
def operators_words(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test with the operator fails, what the operator said meanwhile is printed."""
    began_s = time.monotonic()
    yield
    if request.node.stash.get(_failed, False) and "operator" in request.fixturenames:
        installed: Operator = request.getfixturevalue("operator")
        print(installed.logs(since_s=time.monotonic() - began_s))


@pytest.fixture(scope="session")
def crds(cluster: ClusterUnderTest, operator: Operator) -> list[str]:
    """The project's CRDs, as the chart brings them, Established; their names."""
    folder = ROOT / "crds"
    applied = json.loads(_kubectl(cluster, "get", "-f", str(folder), "-o", "json"))["items"]
    _kubectl(cluster, "wait", "-f", str(folder), "--for=condition=Established", "--timeout=120s")
    return [crd["metadata"]["name"] for crd in applied]


@pytest_asyncio.fixture
async def kube(cluster: ClusterUnderTest) -> AsyncIterator[Kube]:
    """The API server, as the cluster's admin."""
    async with await Kube.of(cluster.kubeconfig) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_kube(cluster: ClusterUnderTest) -> AsyncIterator[Kube]:
    """The same for all tests of a module, which then share its event loop."""
    async with await Kube.of(cluster.kubeconfig) as client:
        yield client


@pytest_asyncio.fixture
async def namespace(
    cluster: ClusterUnderTest, kube: Kube, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """A namespace of the test's own; where the test fails, what is in it is printed."""
    async with _namespace(cluster, kube, lambda: request.node.stash.get(_failed, False)) as name:
        yield name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_namespace(
    cluster: ClusterUnderTest, module_kube: Kube, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """A namespace for all tests of a module, for what takes long to set up."""
    before = request.session.testsfailed

    def failed() -> bool:
        return request.session.testsfailed > before

    async with _namespace(cluster, module_kube, failed) as name:
        yield name


@asynccontextmanager
async def _namespace(cluster: ClusterUnderTest, kube: Kube, failed: Callable[[], bool]) -> AsyncIterator[str]:
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    metadata = {"name": name, "labels": {NAMESPACE_LABEL: "true"}}
    await kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    yield name
    if failed():
        for what in ("mooncake", "pods,services,deployments", "events"):
            print(_kubectl(cluster, "get", what, "-o", "wide", "-n", name, check=False))
    await kube.delete("Namespace", name)


def _await_end_of_namespaces(cluster: ClusterUnderTest) -> None:
    _kubectl(cluster, "wait", "namespace", f"--selector={NAMESPACE_LABEL}", "--for=delete", "--timeout=400s")


def _kubectl(cluster: ClusterUnderTest, *arguments: str, check: bool = True) -> str:
    ran = subprocess.run(
        [programs.find("kubectl"), f"--kubeconfig={cluster.kubeconfig}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if check and ran.returncode:
        pytest.fail(f"kubectl {' '.join(arguments)}: {ran.stderr}")
    return ran.stdout if check else ran.stdout + ran.stderr
