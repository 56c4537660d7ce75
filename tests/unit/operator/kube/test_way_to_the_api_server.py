"""How requests get to the API server: through the environment's proxy, and unpacked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from mooncake_operator.kube.client import AT_ONCE, Client
from mooncake_operator.kube.errors import UnavailableError
from mooncake_operator.kube.resources import POD
from mooncake_operator.kube.retry import RetryRules
from mooncake_testing.waiting import until

AWAY = "http://api-server.invalid:6443"


class Listener:
    """An HTTP server that notes what it is asked."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[web.Request] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        await self.answers.wait()
        return web.json_response({"metadata": {"name": "a"}})


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    runner = web.ServerRunner(web.Server(listener.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    listener.port = runner.addresses[0][1]
    try:
        yield listener
    finally:
        await runner.cleanup()


def configuration(host: str) -> Configuration:
    found = Configuration()
    found.host = host
    return found


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def test_requests_go_through_the_proxy_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        async with Client(configuration(AWAY)) as client:
            assert (await client.get(POD, "n", "a"))["metadata"]["name"] == "a"
    assert [request.headers["Host"] for request in proxy.asked] == ["api-server.invalid:6443"]


async def test_hosts_that_no_proxy_names_are_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", ".invalid")
        async with Client(configuration(AWAY), rules=RetryRules(attempts=1)) as client:
            with pytest.raises(UnavailableError):
                await client.get(POD, "n", "a")
    assert not proxy.asked


async def test_a_kubeconfigs_own_proxy_goes_before_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with listening() as proxy:
        own = configuration(AWAY)
        own.proxy = f"http://127.0.0.1:{proxy.port}"
        async with Client(own) as client:
            await client.get(POD, "n", "a")
    assert len(proxy.asked) == 1


async def test_answers_are_asked_for_unpacked() -> None:
    async with listening() as server, Client(configuration(f"http://127.0.0.1:{server.port}")) as client:
        await client.get(POD, "n", "a")
    assert server.asked[0].headers["Accept-Encoding"] == "identity"


async def test_no_more_requests_are_under_way_than_the_api_server_would_take_up_soon() -> None:
    """They would wait in its queues, and whatever else this account asks for behind them."""
    async with listening() as server, Client(configuration(f"http://127.0.0.1:{server.port}")) as client:
        server.answers.clear()
        async with asyncio.TaskGroup() as group:
            for _ in range(3 * AT_ONCE):
                group.create_task(client.get(POD, "n", "a"))
            await until(lambda: len(server.asked) >= AT_ONCE)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(server.asked) == AT_ONCE
            server.answers.set()
    assert len(server.asked) == 3 * AT_ONCE
