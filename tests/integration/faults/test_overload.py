"""Entries 19, 23 and 25 on a fleet of simulated engines: overload, a noisy tenant, a prefix that all want."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.raw_client import RawClient, request_bytes
from mooncake_testing.simulated import Simulated

SCALE = 20.0
BLOCK = 16
_fresh = itertools.count(1)


class Fleet(NamedTuple):
    """Four prefill and two decode instances, of which a test uses as many as it wants."""

    prefill: Sequence[Instance]
    decode: Sequence[Instance]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Simulated(time_scale=SCALE) as simulated:
        found: dict[Role, list[Instance]] = {Role.PREFILL: [], Role.DECODE: []}
        connector = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
        for role, count in ((Role.PREFILL, 4), (Role.DECODE, 2)):
            for number in range(count):
                engine = simulated.engine(connector=connector)
                found[role].append(
                    Instance(
                        id=f"{role}-{number}", role=role, url=engine.url, model="tiny", pool=str(role),
                        revision="1", engine=EngineKind.SIMULATED, engine_version="1",
                        connector="MooncakeConnector", bootstrap_url=engine.bootstrap_url,
                        block_size_tokens=BLOCK, kv_capacity_tokens=1_400_000,
                    )
                )  # fmt: skip
        yield Fleet(found[Role.PREFILL], found[Role.DECODE])


@asynccontextmanager
async def before(
    folder: Path, instances: Sequence[Instance], key: str = "", **settings: Any
) -> AsyncIterator[Gateway]:
    async with gateway(
        folder, instances, time_scale=SCALE, profile="llama3-70b-8xa800", **settings
    ) as running:
        # Pairs learn of each other first: under load that takes longer than an engine waits for it.
        for _ in range(len(instances)):
            greeting = request_bytes({"prompt": unique_prompt(40)}, authorization=f"Bearer {key}")
            assert (await ask(running, greeting)).status == 200
        yield running


def unique_prompt(tokens: int) -> list[int]:
    """A prompt that no other begins like."""
    return [100_000 + next(_fresh), *range(1_000, 1_000 + tokens - 1)]


class Ended(NamedTuple):
    """How a request ended."""

    status: int
    error: dict[str, Any]
    retry_after_s: int


async def ask(running: Gateway, body: bytes) -> Ended:
    client = await RawClient.connect(running.port)
    try:
        client.writer.write(body)
        data = await client.reader.readuntil(b"\r\n\r\n")
        lines = data.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        status = int(lines[0].split()[1])
        if status == 200 and headers["content-type"].startswith("text/event-stream"):
            assert b'"error"' not in await client.reader.readuntil(b"[DONE]")
            return Ended(status, {}, 0)
        text = await client.reader.readexactly(int(headers["content-length"]))
        return Ended(status, json.loads(text).get("error", {}), int(headers.get("retry-after", "0")))
    finally:
        client.leave()


# -- entry 19: what it does to goodput is worked out without a clock in tests/unit/conductor/test_overload.py


async def test_overload_is_refused_with_a_reason_instead_of_queued(tmp_path: Path, fleet: Fleet) -> None:
    """60 prompts of 2 s each at four times the rate that one instance can carry, 12 s to the first token."""
    longest_s: dict[str, float] = {}
    ended: dict[str, list[Ended]] = {}
    # Without a target nothing is too late: all that came is queued.
    for mode, slo in (("none", {}), ("predictive", {"ttft_s": 12.0})):
        pair = [fleet.prefill[0], fleet.decode[0]]
        fields = {"max_tokens": 4, "stream": True}
        bodies = [request_bytes({"prompt": unique_prompt(16_000), **fields}) for _ in range(60)]
        settings = {"admission": {"mode": mode}, "slo": slo}
        async with before(tmp_path, pair, **settings) as running:
            ledger, clock = running.scheduler.services.ledger, running.scheduler.services.clock
            sent = []
            longest_s[mode] = 0.0
            for body in bodies:
                sent.append(asyncio.ensure_future(ask(running, body)))
                await asyncio.sleep(0.5 / SCALE)
                loads = ledger.loads(clock.now_s()).values()
                longest_s[mode] = max([longest_s[mode], *(load.queued_s for load in loads)])
            ended[mode] = await asyncio.gather(*sent)
            await running.settled()
    assert Counter(each.status for each in ended["none"]) == {200: 60}
    assert longest_s["predictive"] <= 12.0 < 24.0 < longest_s["none"], longest_s
    statuses = Counter(each.status for each in ended["predictive"])
    assert statuses[200] >= 8
    assert statuses[429] == 60 - statuses[200] > 10
    for each in ended["predictive"]:
        if each.status == 429:
            assert each.error["code"] == "ttft"
            assert each.error["predicted"]["ttft_s"] > 12.0
            assert each.retry_after_s >= 1


# -- entry 23


async def test_a_noisy_tenant_is_refused_and_a_quiet_one_is_served(tmp_path: Path, fleet: Fleet) -> None:
    """Both send as many requests; those of one are many times as long, and too many by far."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"noisy": "n-key", "quiet": "q-key"}))
    settings = {
        "admission": {"mode": "predictive"}, "slo": {"ttft_s": 12.0}, "auth": {"api_keys_file": str(keys)},
    }  # fmt: skip
    fields = {"max_tokens": 4, "stream": True}
    bodies = {
        "noisy": [
            request_bytes({"prompt": unique_prompt(24_000), **fields}, authorization="Bearer n-key")
            for _ in range(40)
        ],
        "quiet": [
            request_bytes({"prompt": unique_prompt(1_000), **fields}, authorization="Bearer q-key")
            for _ in range(40)
        ],
    }
    async with before(tmp_path, [fleet.prefill[0], fleet.decode[0]], "q-key", **settings) as running:
        # From here on both are known to be asking.
        assert (await ask(running, bodies["quiet"].pop())).status == 200
        assert (await ask(running, bodies["noisy"].pop())).status == 200
        sent: dict[str, list[asyncio.Future[Ended]]] = {"noisy": [], "quiet": []}
        for pair in zip(bodies["noisy"], bodies["quiet"], strict=True):
            for tenant, body in zip(sent, pair, strict=True):
                sent[tenant].append(asyncio.ensure_future(ask(running, body)))
            await asyncio.sleep(0.03)
        noisy = await asyncio.gather(*sent["noisy"])
        quiet = await asyncio.gather(*sent["quiet"])
        await running.settled()
    refused = Counter(each.error["code"] for each in noisy if each.status != 200)
    assert refused["tenant_quota"] > 0
    assert sum(each.status == 200 for each in noisy) >= 4, "refused is not shut out"
    assert sum(each.status == 200 for each in quiet) >= 37, Counter(each.error.get("code") for each in quiet)


# -- entry 25 (and 7)


async def legs_and_cached_tokens(folder: Path, fleet: Fleet) -> tuple[dict[str, int], int]:
    """Prefill legs by instance, and tokens found in caches.

    64 requests, four in five with the same 8 000 tokens in front: three times what one instance can carry.
    """
    chance = random.Random(1)
    hot = unique_prompt(8_000)
    bodies = []
    for _ in range(64):
        front = hot if chance.random() < 0.8 else unique_prompt(8_000)
        prompt = [*front, *unique_prompt(4_000)]
        bodies.append(request_bytes({"prompt": prompt, "max_tokens": 2, "stream": True}))
    async with before(folder, [*fleet.prefill, *fleet.decode]) as running:
        warm = request_bytes({"prompt": [*hot, 5], "max_tokens": 2, "stream": True})
        assert (await ask(running, warm)).status == 200
        members = running.scheduler.services.roster.members.values()
        before_legs = Counter({m.instance.id: m.requests for m in members})
        before_cached = sum(m.cached_tokens for m in members)
        sent = []
        for body in bodies:
            sent.append(asyncio.ensure_future(ask(running, body)))
            await asyncio.sleep(0.008)
        assert [each.status for each in await asyncio.gather(*sent)] == [200] * 64
        await running.settled()
        legs = {
            m.instance.id: m.requests - before_legs[m.instance.id]
            for m in members
            if m.instance.role is Role.PREFILL
        }
        return legs, sum(m.cached_tokens for m in members) - before_cached


async def test_a_prefix_that_all_want_is_computed_on_more_instances_rather_than_waited_for(
    tmp_path: Path, fleet: Fleet
) -> None:
    legs, cached = await legs_and_cached_tokens(tmp_path, fleet)
    # Its first holder alone would get four in five, and a share of the others.
    assert max(legs.values()) < 0.65 * sum(legs.values()), legs
    # Balance alone would be easy: the prefix has to be used as well.
    assert cached > 30 * 7_000, cached
