"""The quickstart as it is committed, from its manifest to measured requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml

from mooncake_testing.cluster import Cluster, cluster, until_none
from mooncakectl.commands.demo import workload
from mooncakectl.replay import ReplayOptions, ReplayResult, replay

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
REQUESTS = 150
SPEED = 30.0


@pytest.fixture(scope="module")
def quickstart() -> Iterator[Cluster]:
    with cluster(QUICKSTART.read_text()) as started:
        yield started


@pytest.fixture
def client(quickstart: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{quickstart.endpoint}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_the_openai_client_gets_chats_and_completions_whole_and_as_streams(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    completion = client.completions.create(model=model.id, prompt="Hello", max_tokens=8)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    assert completion.choices[0].text

    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model=model.id, messages=messages, max_tokens=8)
    assert chat.choices[0].finish_reason == "length"
    streamed = list(
        client.chat.completions.create(
            model=model.id,
            messages=messages,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == chat.choices[0].message.content
    assert streamed[-1].usage is not None
    assert streamed[-1].usage.completion_tokens == 8


async def test_a_workload_is_served_and_the_hit_rate_is_that_of_one_scheduler(quickstart: Cluster) -> None:
    assert len(quickstart.admin_urls) == 2
    two = await served(quickstart)
    documents = yaml.safe_load(QUICKSTART.read_text())
    documents["spec"]["scheduler"]["replicas"] = 1
    documents["metadata"]["name"] = "single"
    with cluster(yaml.safe_dump(documents)) as single:
        assert len(single.admin_urls) == 1
        one = await served(single)
    assert one.token_hit_rate is not None
    assert two.token_hit_rate is not None
    print(f"token hit rate: {one.token_hit_rate:.4f} with one scheduler, {two.token_hit_rate:.4f} with two")
    assert two.token_hit_rate > 0.5
    assert abs(one.token_hit_rate - two.token_hit_rate) <= 0.02


async def served(cluster: Cluster) -> ReplayResult:
    """Replay; nothing is lost, nearly all is served, and no work stays behind."""
    result = await replay(workload(REQUESTS, 1), ReplayOptions(url=cluster.endpoint, speed=SPEED))
    print(
        f"{result.completed} completed, {result.refused_by_reason} refused, hit rate {result.token_hit_rate}"
    )
    assert (result.lost, result.failed) == (0, 0)
    assert result.completed >= 0.95 * REQUESTS
    assert result.completed + result.refused == REQUESTS
    assert set(result.refused_by_reason) <= {"ttft", "tbt", "kv_memory"}
    until_none(cluster.index_disagrees, "Redis holds what the engines hold")
    until_none(cluster.work_in_the_ledger, "the ledger is empty")
    return result
