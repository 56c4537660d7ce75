"""Fixtures of the operator's tests against a real API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from mooncake_operator.kube.client import Client
from mooncake_testing.apiserver import ApiServer, api_server, namespace
from mooncake_testing.played_nodes import PlayedScheduler
from mooncake_testing.played_world import PlayedWorld

__all__ = ["api_server", "client", "namespace"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An API server on a busy machine may take its time; whatever waits says itself for what it waited."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600, func_only=True))


@pytest.fixture
async def client(api_server: ApiServer) -> AsyncIterator[Client]:
    configuration = Configuration()
    await config.load_kube_config(str(api_server.kubeconfig), client_configuration=configuration)
    async with Client(configuration) as client:
        yield client


@pytest.fixture
async def world(client: Client, namespace: str) -> AsyncIterator[PlayedWorld]:
    async with PlayedScheduler().serve() as scheduler:
        yield PlayedWorld(client, namespace, scheduler)
