"""An operator and CustomResourceDefinitions of different versions: it says what is missing, and ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_operator.control.definitions import lacks, require_current_definitions
from mooncake_operator.kube.client import Client
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.operator_process import OperatorProcess
from mooncake_testing.waiting import eventually, until

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOLS = "mooncakedecodepools.mooncake.io"


class Definition:
    """One definition as it is, and as an earlier version had it."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self._server = server
        self._path = f"{DEFINITIONS}/{name}"
        self._current = server.request("GET", self._path)

    def become(self, change: Any) -> None:
        live = self._server.request("GET", self._path)
        spec = copy.deepcopy(self._current["spec"])
        change(spec["versions"][0])
        self._server.request("PUT", self._path, {**live, "spec": spec})

    def restore(self) -> None:
        self.become(lambda version: None)


@pytest.fixture
def definition(api_server: ApiServer) -> Iterator[Definition]:
    found = Definition(api_server, POOLS)
    yield found
    found.restore()


def without_last_failures(version: Any) -> None:
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    del schema["status"]["properties"]["lastFailures"]
    del schema["status"]["properties"]["recreations"]["items"]["properties"]["pairing"]


def without_selectable_fields(version: Any) -> None:
    del version["selectableFields"]


async def told(client: Client) -> list[str]:
    """What is lacking, once the API server has noticed."""
    found: list[str] = []

    async def anything() -> bool:
        found[:] = await lacks(client, "default")
        return bool(found)

    await until(anything)
    return found


async def test_definitions_of_this_version_lack_nothing(client: Client) -> None:
    await require_current_definitions(client, patience_s=60)


async def test_what_earlier_definitions_lack_is_named_field_by_field(
    client: Client, definition: Definition
) -> None:
    definition.become(without_last_failures)
    assert await told(client) == [f"{POOLS} lacks status.lastFailures, status.recreations[].pairing"]


async def test_pools_that_cannot_be_asked_for_by_their_cluster_are_named(
    client: Client, definition: Definition
) -> None:
    definition.become(without_selectable_fields)
    assert await told(client) == [f"{POOLS} cannot be selected by spec.clusterRef.name"]


def test_an_operator_that_came_before_its_definitions_says_what_to_apply_and_ends(
    api_server: ApiServer, definition: Definition, tmp_path: Path
) -> None:
    definition.become(without_last_failures)
    operator = OperatorProcess(api_server.kubeconfig, tmp_path, lease=False)
    try:
        eventually(lambda: operator.process.poll() is not None, "it has ended", 90)
        assert operator.process.returncode == 1
        (end,) = operator.said("the operator ends")
        assert f"{POOLS} lacks status.lastFailures, status.recreations[].pairing" in end["why"]
        assert "kubectl apply --server-side --force-conflicts -f crds/" in end["why"]
    finally:
        operator.kill()
