"""From the second turn on an engine computes what is new and one block more at most, wherever it goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from zlib import crc32

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake_core.blocks import block_keys
from mooncake_testing.cluster import Cluster
from mooncake_testing.waiting import eventually

BLOCK = 512


class Conversation:
    """A user who says more with each turn, and what the cluster makes of it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._chance = random.Random(seed)
        self.tokens: list[int] = []

    def turn(self, new_tokens: int) -> tuple[int, str]:
        """Say so much more; returns how many tokens were computed for it, and by which prefill instance.

        What engines count and what the user is told must be the same.
        """
        cluster = self._cluster
        self.tokens += [self._chance.randrange(10, 30_000) for _ in range(new_tokens)]
        body = {"model": cluster.model, "prompt": self.tokens, "max_tokens": 20, "ignore_eos": True}
        before = self._computed_by_engine()
        answer = httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(self.tokens), 20)
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        prefill = self._prefill_of(answer.headers["x-request-id"])
        counted = self._computed_by_engine()[prefill] - before[prefill]
        assert counted == pytest.approx(computed, abs=1)
        return computed, prefill

    def until_stored(self) -> None:
        """Wait until all its blocks are known to be in the store."""
        keys = set(block_keys(self.tokens, BLOCK))
        store = f"{self._cluster.name}-kv"
        eventually(
            lambda: keys <= self._cluster.indexed_blocks()[store], "the turn's blocks are in the store"
        )

    def _prefill_of(self, request_id: str) -> str:
        for admin in self._cluster.admin_urls:
            answer = httpx.get(f"{admin}/decisions/{request_id}", trust_env=False)
            if answer.status_code == 200:
                return str(answer.json()["placement"]["prefill"])
        raise AssertionError(f"no scheduler has decided on {request_id}")

    def _computed_by_engine(self) -> dict[str, float]:
        computed = {}
        for pod, url in self._cluster.engine_urls.items():
            try:
                text = httpx.get(f"{url}/metrics", trust_env=False).text
            except httpx.ConnectError:  # killed
                continue
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == "vllm:request_prefill_kv_computed_tokens_sum":
                        computed[pod] = sample.value
        return computed


@pytest.fixture
def conversation(running: Cluster, request: pytest.FixtureRequest) -> Iterator[Conversation]:
    yield Conversation(running, seed=crc32(request.node.name.encode()))
    eventually(running.is_whole, "the cluster is whole again")


def test_a_turn_costs_its_new_tokens_and_at_most_one_block(conversation: Conversation) -> None:
    computed, _ = conversation.turn(5000)
    assert computed == 5000
    for new_tokens in (700, 40, 1300):
        conversation.until_stored()
        computed, _ = conversation.turn(new_tokens)
        assert computed <= new_tokens + BLOCK


def test_a_turn_that_goes_to_another_instance_finds_the_conversation_in_the_store(
    running: Cluster, conversation: Conversation
) -> None:
    _, first = conversation.turn(5000)
    conversation.until_stored()
    running.drain(first)
    try:
        computed, second = conversation.turn(700)
    finally:
        running.drain(first, draining=False)
    assert second != first
    assert computed <= 700 + BLOCK


def test_a_turn_after_the_first_instance_was_killed_finds_the_conversation_in_the_store(
    running: Cluster, conversation: Conversation
) -> None:
    _, first = conversation.turn(5000)
    conversation.until_stored()
    killed = running.kill(first, "engine")
    computed, second = conversation.turn(700)
    assert second != first
    assert computed <= 700 + BLOCK
    eventually(lambda: running.is_replaced(first, "engine", killed), f"{first} runs again")
