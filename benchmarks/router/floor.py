"""What the parts of this gateway cost that no request can do without: a lower bound beside the whole.

Run as `python floor.py PORT STEP REDIS_URL ENGINE_URL…`, the engines are asked in turn.
Each step does what the one before does, and more:

- `bytes`: the HTTP of client and engine, on the gateway's own protocols, and nothing else;
- `keys`: the prompt's token ids read and its block keys computed;
- `redis`: two questions to Redis, one after the other, as the index and the ledger need them; PINGs here.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop

from mooncake_core.blocks import block_keys
from mooncake_core.resp import RespClient
from mooncake_scheduler.gateway.body import Body, token_ids
from mooncake_scheduler.gateway.http1 import Fault, Upstream
from mooncake_scheduler.gateway.http1.exchange import Exchange
from mooncake_scheduler.gateway.http1.server import HttpServer, ServerLimits

STEPS = ["bytes", "keys", "redis"]
BLOCK_SIZE_TOKENS = 16


class Relay:
    """An engine's answer, passed on when it is whole."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._status = 502
        self._parts: list[bytes] = []

    def head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        self._parts.append(data)

    def end(self) -> None:
        self._exchange.respond(self._status, b"".join(self._parts))

    def failed(self, fault: Fault) -> None:
        self._exchange.respond(502, b"{}")


class Floor:
    """Passes requests on, round robin."""

    def __init__(self, step: str, engines: list[str], redis: RespClient) -> None:
        self._step = STEPS.index(step)
        self._engines = itertools.cycle([Upstream(url) for url in engines])
        self._redis = redis
        self._asking: set[asyncio.Task[None]] = set()

    def head(self, exchange: Exchange) -> bool:
        return False

    def request(self, exchange: Exchange) -> None:
        if exchange.method == b"GET":
            exchange.respond(200, b"{}")
            return
        if self._step >= STEPS.index("keys"):
            prompt = Body(exchange.body).raw("prompt")
            assert prompt is not None
            block_keys(token_ids(prompt), BLOCK_SIZE_TOKENS)
        if self._step < STEPS.index("redis"):
            self._pass_on(exchange)
            return
        asking = asyncio.get_running_loop().create_task(self._ask(exchange))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _ask(self, exchange: Exchange) -> None:
        await self._redis.call(b"PING")
        await self._redis.call(b"PING")
        self._pass_on(exchange)

    def _pass_on(self, exchange: Exchange) -> None:
        next(self._engines).request(b"POST", exchange.path, b"", exchange.body, Relay(exchange))


async def _serve(port: int, step: str, redis_url: str, engines: list[str]) -> None:
    redis = RespClient(redis_url)
    await redis.connect()
    server = HttpServer(Floor(step, engines, redis), ServerLimits(), lambda _status, _message: b"{}")
    await server.start("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
