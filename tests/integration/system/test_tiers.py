"""`mooncakectl up` with a store that has SSDs: conversations are followed, what shall stay is looked up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mooncake_operator.planning.names import Port
from mooncake_testing.cluster import Cluster, cluster
from mooncake_testing.waiting import until

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiers.yaml"
CONVERSATIONS, TURN_TOKENS = 6, 2_048


@pytest.fixture(scope="module")
def tiers() -> Iterator[Cluster]:
    with cluster(EXAMPLE.read_text()) as running:
        yield running


async def speak(tiers: Cluster, http: httpx.AsyncClient, conversation: int, turn: int) -> None:
    """The next turn of a conversation: all that was said before, and something new."""
    first = 1_000_000 * (conversation + 1)
    prompt = list(range(first, first + turn * TURN_TOKENS + 1))
    body = {"model": tiers.model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = await http.post(f"{tiers.endpoint}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def metric(http: httpx.AsyncClient, urls: list[str], name: str) -> float:
    """A metric without labels, summed over processes."""
    total = 0.0
    for url in urls:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
        total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))
    return total


def sidecar_url(engine_url: str) -> str:
    """A Pod's ports lie side by side."""
    engine = httpx.URL(engine_url)
    assert engine.port is not None
    return str(engine.copy_with(port=engine.port + Port.SIDECAR - Port.ENGINE)).rstrip("/")


async def test_one_scheduler_follows_all_conversations_and_sidecars_keep_what_shall_stay(
    tiers: Cluster,
) -> None:
    sidecars = [sidecar_url(url) for url in tiers.engine_urls.values()]
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        for turn in range(1, 4):
            await asyncio.gather(*(speak(tiers, http, number, turn) for number in range(CONVERSATIONS)))

        async def followed() -> bool:
            leads = await metric(http, tiers.admin_urls, "mooncake_promotion_leads")
            return leads == 1 and (
                await metric(http, tiers.admin_urls, "mooncake_promotion_sessions") == CONVERSATIONS
            )

        await until(followed)

        async def kept() -> bool:
            # Of each conversation the three turns' blocks; some are known to the sidecar of a decode engine.
            blocks = CONVERSATIONS * 3 * TURN_TOKENS // 512
            return await metric(http, sidecars, "mooncake_sidecar_pool_blocks_kept_total") >= blocks

        await until(kept)
        assert await metric(http, sidecars, "mooncake_sidecar_store_client_away") == 0
