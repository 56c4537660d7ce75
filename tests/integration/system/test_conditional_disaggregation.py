"""`disaggregationThresholdTokens`: what is short, and continues what a decode instance holds, stays there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mooncake_testing.cluster import Cluster, cluster
from mooncake_testing.waiting import eventually

MANIFEST = """
apiVersion: mooncake.io/v1alpha1
kind: MooncakeCluster
metadata: {name: short}
spec:
  model: {name: tiny}
  engine:
    type: Simulated
    connector: MooncakeConnector
    blockSize: 16
    simulated: {profile: llama3-70b-8xa800, timeScale: 10}
  prefillPools: [{name: prefill, replicas: 1, drain: {timeoutSeconds: 20}}]
  decodePools: [{name: decode, replicas: 2, drain: {timeoutSeconds: 20}}]
  scheduler:
    redis: {managed: {}}
    routing: {disaggregationThresholdTokens: 128}
    admission: {mode: none}
"""
PROMPT = list(range(1_000, 3_000))


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(MANIFEST) as started:
        yield started


def ask(running: Cluster, prompt: list[int], request_id: str) -> dict[str, Any]:
    """Send a prompt; returns the decision that was taken."""
    answer = httpx.post(
        f"{running.endpoint}/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 4},
        headers={"X-Request-Id": request_id},
        timeout=30,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    decision: dict[str, Any] = running.get(f"{running.admin_urls[0]}/decisions/{request_id}")
    return decision


def prompt_tokens(running: Cluster, pod: str) -> float:
    """What an engine has been asked to compute since it began."""
    text = httpx.get(f"{running.engine_urls[pod]}/metrics", timeout=10, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_short_rest_is_computed_where_its_prefix_is_decoded_and_a_long_one_is_not(running: Cluster) -> None:
    (prefill,) = (pod for pod in running.engine_urls if "-prefill-" in pod)
    first = ask(running, PROMPT, "first")
    holder = first["placement"]["decode"]
    assert first["placement"]["prefill"] == prefill
    blocks = len(PROMPT) // 16
    eventually(
        lambda: len(running.indexed_blocks()[holder]) >= blocks, f"the index knows what {holder} holds"
    )
    computed = prompt_tokens(running, prefill)

    short = ask(running, [*PROMPT, *range(5_000, 5_100)], "short")
    assert short["placement"]["prefill"] is None
    assert short["placement"]["decode"] == holder
    assert short["cached_tokens"] >= len(PROMPT) - 16
    assert prompt_tokens(running, prefill) == computed, "the prefill instance was asked all the same"

    long = ask(running, [*PROMPT, *range(7_000, 7_400)], "long")
    assert long["placement"]["prefill"] == prefill
    assert prompt_tokens(running, prefill) > computed
