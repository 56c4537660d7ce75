"""Simulated processes shared by the tests of one module."""

from collections.abc import Iterator

import pytest

from mooncake_testing.simulated import Simulated


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    with Simulated() as processes:
        yield processes
