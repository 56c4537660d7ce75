"""The documents of the simulated engine have vLLM 0.32's fields, in its order.

Fields as in `entrypoints/openai/{completion,chat_completion,models}/protocol.py` and
`entrypoints/serve/engine/protocol.py`: whole answers spell out every field, chunks those that were set.
"""

from typing import Any

import msgspec
import pytest

from mooncake_simulator.engine.openai_answers import StreamWriter, whole_answer
from mooncake_simulator.engine.openai_requests import ApiError, Generation

USAGE = [
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
]


def generation(**fields: Any) -> Generation:
    defaults: dict[str, Any] = {
        "id": "cmpl-1", "chat": False, "model": "m", "prompt": [1, 2, 3], "prompt_text": None,
        "max_tokens": 4, "stream": True, "include_usage": True, "continuous_usage": False,
        "min_tokens": 0, "ignore_eos": False, "stop": [], "stop_in_output": False, "salt": None,
        "stop_token_ids": frozenset(), "return_token_ids": False, "echo": False, "seed": 0, "transfer": None,
    }  # fmt: skip
    return Generation(**{**defaults, **fields})


def whole(request: Generation) -> dict[str, Any]:
    return whole_answer(
        request,
        "text",
        [7],
        finish_reason="length",
        stop_reason=None,
        cached=2,
        fingerprint="f",
        transfer=None,
    )


def events(data: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in data.split(b"\n\n") if part]


def test_a_whole_completion() -> None:
    document = whole(generation())
    assert list(document) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert list(document["choices"][0]) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
        *("prompt_token_ids", "routed_experts"),
    ]
    assert list(document["usage"]) == USAGE
    assert list(document["usage"]["prompt_tokens_details"]) == [
        *("cached_tokens", "created_cache_tokens", "multimodal_tokens"),
    ]


def test_a_whole_chat_completion() -> None:
    document = whole(generation(chat=True))
    assert list(document) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    choice = document["choices"][0]
    assert list(choice) == [
        *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"),
    ]
    assert list(choice["message"]) == [
        *("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"),
    ]


def test_the_chunks_of_a_completion() -> None:
    writer = StreamWriter(generation(), "f")
    first, last, counts = events(
        writer.token("a", [7], 1) + writer.last("b", [8], 2, "stop", 8) + writer.usage(2, 2)
    )
    choice = ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"]
    for chunk in (first, last):
        assert list(chunk) == ["id", "object", "created", "model", "choices"]
        assert list(chunk["choices"][0]) == choice
    assert list(counts) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert counts["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_the_chunks_of_a_chat() -> None:
    writer = StreamWriter(generation(chat=True), "f")
    role, first, last = events(writer.token("a", [7], 1) + writer.last("b", [8], 2, "length", None))
    assert list(role) == [
        *("id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"),
    ]
    assert role["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert list(first["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
    assert list(last["choices"][0]) == [
        *("index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"),
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_and_running_usage_are_sent_when_asked_for(chat: bool) -> None:
    request = generation(chat=chat, return_token_ids=True, continuous_usage=True)
    writer = StreamWriter(request, "f")
    chunks = events(writer.token("a", [7], 1) + writer.token("b", [8], 2))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-2:] == [1, 2]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks][-2:] == [[7], [8]]
    prompts = [
        chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in chunks
    ]
    assert [prompt for prompt in prompts if prompt] == [[1, 2, 3]]


def test_without_usage_the_last_chunk_carries_the_fingerprint() -> None:
    (chunk,) = events(StreamWriter(generation(include_usage=False), "f").last("", [], 0, "abort", None))
    assert chunk["system_fingerprint"] == "f"


def test_an_error() -> None:
    assert ApiError(404, "NotFoundError", "gone", "model").body() == {
        "error": {"message": "gone", "type": "NotFoundError", "param": "model", "code": 404}
    }
