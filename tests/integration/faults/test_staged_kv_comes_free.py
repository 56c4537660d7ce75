"""Entries 1, 2, 3 and 5 on engines that count their blocks: whoever leaves or dies, nothing leaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.raw_client import RawClient
from mooncake_testing.simulated import Simulated, SimulatedProcess

SCALE = 20.0
OWN_LIMIT_S = 5
GIVEN_UP = "nobody came for its KV"
"""What the prefill engine logs after `OWN_LIMIT_S`: by then the blocks were kept for nothing."""


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    with Simulated(time_scale=SCALE) as processes:
        yield processes


@pytest.fixture(scope="module", params=["MooncakeConnector", "NixlConnector"])
def pair(
    simulated: Simulated, request: pytest.FixtureRequest
) -> tuple[str, SimulatedProcess, SimulatedProcess]:
    connector = {
        "kv_connector": request.param,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kv_lease_duration": OWN_LIMIT_S},
    }
    environ = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(OWN_LIMIT_S)}
    prefill, decode = (simulated.engine(connector=connector, environ=environ) for _ in range(2))
    return request.param, prefill, decode


def instance(name: str, role: Role, connector: str, engine: SimulatedProcess) -> Instance:
    return Instance(
        id=name, role=role, url=engine.url, model="tiny", pool=str(role), revision="1",
        engine=EngineKind.SIMULATED, engine_version="1", connector=connector, block_size_tokens=16,  # type: ignore[arg-type]
        bootstrap_url=engine.bootstrap_url if connector == "MooncakeConnector" else "",
    )  # fmt: skip


@asynccontextmanager
async def served(
    folder: Path, pair: tuple[str, SimulatedProcess, SimulatedProcess], **settings: Any
) -> AsyncIterator[Gateway]:
    connector, prefill, decode = pair
    instances = [
        instance("p", Role.PREFILL, connector, prefill),
        instance("d", Role.DECODE, connector, decode),
    ]
    async with gateway(
        folder, instances, time_scale=SCALE, profile="llama3-70b-8xa800", **settings
    ) as running:
        yield running


async def until(engine: SimulatedProcess, what: str) -> None:
    async with asyncio.timeout(10):
        while not (await asyncio.to_thread(engine.get, "/simulator/state"))[what]:
            await asyncio.sleep(0.005)


async def all_blocks_come_free(*engines: SimulatedProcess) -> None:
    for engine in engines:
        state: dict[str, Any] = {}
        for _ in range(200):
            state = await asyncio.to_thread(engine.get, "/simulator/state")
            busy = state["running"] + state["waiting"] + state["loading"] + state["held"]
            if not busy and state["free_blocks"] == state["blocks"]:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"blocks are still held: {state}")


@pytest.mark.parametrize(
    ("leaves", "stream"),
    [("prefilling", True), ("prefilling", False), ("handed_over", True), ("handed_over", False),
     ("decoding", True)],
)  # fmt: skip
async def test_wherever_a_client_leaves_every_block_of_both_engines_comes_free(
    tmp_path: Path, pair: tuple[str, SimulatedProcess, SimulatedProcess], leaves: str, stream: bool
) -> None:
    _, prefill, decode = pair
    given_up = prefill.log.read_text().count(GIVEN_UP)
    async with served(tmp_path, pair) as running:
        cancelled = running.scheduler.services.metrics.cancellations
        number = 0
        # KV may be held for a moment before the gateway has heard of it: who leaves then has left earlier.
        while cancelled[leaves] < 2:
            number += 1
            assert number < 20, cancelled
            # An engine that stands still keeps the request in the phase in which the client shall leave.
            if leaves != "decoding":
                still = prefill if leaves == "prefilling" else decode
                await asyncio.to_thread(still.post, "/simulator/faults", {"stall_s": 0.2})
            client = await RawClient.ask(
                running.port, prompt=[number, *range(10, 400)], max_tokens=200, ignore_eos=True, stream=stream
            )
            if leaves == "decoding":
                await client.reader.readuntil(b"data: ")
            else:
                await until(prefill, "waiting" if leaves == "prefilling" else "held")
            client.leave()
            await running.settled()
            await all_blocks_come_free(prefill, decode)
        assert sum(cancelled.values()) == number
        assert prefill.log.read_text().count(GIVEN_UP) == given_up
        answer = await running.complete(prompt=list(range(10, 300)), stream=stream)
        assert answer.status_code == 200, "and both serve on"
        await all_blocks_come_free(prefill, decode)


async def test_kv_that_every_decode_refuses_comes_free_by_the_engines_own_limit(
    tmp_path: Path, pair: tuple[str, SimulatedProcess, SimulatedProcess]
) -> None:
    _, prefill, decode = pair
    given_up = prefill.log.read_text().count(GIVEN_UP)
    await asyncio.to_thread(decode.post, "/simulator/faults", {"status_503_retry_after": 1.0})
    try:
        async with served(tmp_path, pair) as running:
            assert (await running.complete(prompt=list(range(1000, 1400)))).status_code == 503
            await running.settled()
            assert (await asyncio.to_thread(prefill.get, "/simulator/state"))["held"] == 1
            await all_blocks_come_free(prefill, decode)
    finally:
        await asyncio.to_thread(decode.post, "/simulator/faults", {"status_503_retry_after": None})
    assert prefill.log.read_text().count(GIVEN_UP) == given_up + 1


async def test_a_prefill_that_dies_with_staged_kv_costs_an_explicit_error_within_the_deadline(
    tmp_path: Path, simulated: Simulated
) -> None:
    connector = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    environ = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "600", "MOONCAKE_SIMULATOR_DEAD_PEER_GRACE": "600"}
    prefill = simulated.engine(connector=connector, environ=environ)
    decode = simulated.engine(connector=connector, environ=environ)
    pair = ("MooncakeConnector", prefill, decode)
    async with served(tmp_path, pair, first_token_timeout_s=1.0, request_timeout_s=20) as running:
        assert (await running.complete()).status_code == 200
        # Decode stands still, so that the hand-over is under way when prefill dies.
        await asyncio.to_thread(decode.post, "/simulator/faults", {"stall_s": 0.8})
        asked = asyncio.ensure_future(running.complete(prompt=list(range(10, 200)), stream=True))
        services = running.scheduler.services
        async with asyncio.timeout(10):
            while not any(load.batch + load.arriving for load in services.ledger.loads(0.0).values()):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        prefill.kill()
        answer = await asyncio.wait_for(asked, 15)
        if answer.status_code == 200:
            events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
            assert events[-1] == "[DONE]"
            assert all(json.loads(event) for event in events[:-1])
        else:
            assert answer.status_code in (502, 503, 504)
            assert "error" in answer.json()
        await running.settled()
