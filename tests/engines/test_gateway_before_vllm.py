"""The gateway in front of real vLLM: what clients get is what one engine alone would have said."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from mooncake_testing.engine_exchange import call
from mooncake_testing.vllm_engine import VllmEngine, VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def ids(seed: int, count: int) -> list[int]:
    """A prompt of token ids inside the tiny model's vocabulary."""
    chance = random.Random(seed)
    return [chance.randrange(10, 390) for _ in range(count)]


LENGTHS = [3, 31, 32, 33, 200, 500, 1000, 1500, 64, 96]
REQUESTS = [
    {"prompt": ids(number, LENGTHS[number % len(LENGTHS)]), "stream": number % 2 == 1, "max_tokens": tokens}
    for number, tokens in enumerate([1, 2, 8, 16, 32, 64, 5, 12, 24, 48, 8, 8, 16, 16, 1, 100, 3, 7, 9, 20])
]


def said(answer: bytes, stream: bool) -> tuple[list[int], str, str | None]:
    """Token ids, text and finish reason of an answer."""
    if not stream:
        choice = json.loads(answer)["choices"][0]
        return choice["token_ids"], choice["text"], choice["finish_reason"]
    tokens: list[int] = []
    text, finish = "", None
    events = [e.removeprefix("data: ") for e in answer.decode().split("\n\n") if e]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            tokens += choice["token_ids"] or []
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return tokens, text, finish


def body_of(request: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "temperature": 0, "return_token_ids": True, **request, **more}


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_a_request_through_prefill_and_decode_gets_the_tokens_of_one_engine_alone(
    vllm_pair: VllmPair, gateway_url: str, number: int
) -> None:
    request = REQUESTS[number]
    through = call(f"{gateway_url}/v1/completions", body_of(request))
    assert through.status == 200, through.body
    alone = call(f"{vllm_pair.prefill.url}/v1/completions", body_of(request))
    assert said(through.body, request["stream"]) == said(alone.body, request["stream"])


def computed_tokens(engine: VllmEngine) -> float:
    """Prompt tokens that an engine has computed itself, by its own count."""
    text = call(f"{engine.url}/metrics").body.decode()
    name = "vllm:request_prefill_kv_computed_tokens_sum"
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )
    return float(value)


def test_prefill_computes_the_prompt_and_decode_takes_its_kv(vllm_pair: VllmPair, gateway_url: str) -> None:
    prefill, decode = vllm_pair.prefill, vllm_pair.decode
    before = computed_tokens(prefill), computed_tokens(decode)
    answer = call(f"{gateway_url}/v1/completions", body_of({"prompt": ids(2024, 640), "max_tokens": 4}))
    assert answer.status == 200, answer.body
    assert computed_tokens(prefill) - before[0] == 640
    assert computed_tokens(decode) - before[1] <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_that_comes_first_ends_the_answer_and_not_the_hand_over(
    vllm_pair: VllmPair, gateway_url: str, stream: bool
) -> None:
    prompt = ids(77, 150)
    first = call(
        f"{vllm_pair.prefill.url}/v1/completions", body_of({"prompt": prompt, "max_tokens": 1})
    ).json()
    stop_first = {
        "prompt": prompt, "max_tokens": 20, "stream": stream,
        "stop_token_ids": first["choices"][0]["token_ids"],
    }  # fmt: skip
    through = call(f"{gateway_url}/v1/completions", body_of(stop_first))
    assert through.status == 200, through.body
    alone = call(f"{vllm_pair.prefill.url}/v1/completions", body_of(stop_first))
    assert said(through.body, stream) == said(alone.body, stream)
    assert said(through.body, stream)[2] == "stop"


def test_a_client_cannot_steer_the_hand_over_with_its_own_transfer_parameters(
    vllm_pair: VllmPair, gateway_url: str
) -> None:
    # This very body kills a decode engine of vLLM 0.32 when it gets through.
    poison = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "xfer-mine"}
    request = {"prompt": ids(5, 100), "max_tokens": 4, "kv_transfer_params": poison}
    answer = call(f"{gateway_url}/v1/completions", body_of(request))
    assert answer.status == 200, answer.body
    assert call(f"{vllm_pair.decode.url}/health").status == 200


def test_usage_tells_what_the_prefill_found_in_its_cache(gateway_url: str) -> None:
    request = {"prompt": ids(1009, 640), "max_tokens": 2}
    first = call(f"{gateway_url}/v1/completions", body_of(request)).json()
    again = call(f"{gateway_url}/v1/completions", body_of(request)).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # 640 tokens are 20 blocks; the last token is always computed, so its block is not credited.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 608


def test_the_openai_client_chats_and_streams(gateway_url: str) -> None:
    with OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "a question about a long document"}]
        whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
        streamed = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
