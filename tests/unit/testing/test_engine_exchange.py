"""What the comparison of engines takes for a fact, and what for the moment's load."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake_testing.engine_exchange import Answer, answer_facts


def _chunk(text: str, reason: str | None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def _stream(*chunks: dict[str, Any]) -> Answer:
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return Answer(200, {"content-type": "text/event-stream"}, body.encode())


@pytest.mark.parametrize("usage", [[], [{"choices": [], "usage": {"total_tokens": 3}}]])
def test_tokens_put_into_one_chunk_by_a_busy_engine_are_no_difference(usage: list[dict[str, Any]]) -> None:
    apart = _stream(_chunk("a", None), _chunk("b", None), _chunk("c", "length"), *usage)
    together = _stream(_chunk("abc", "length"), *usage)
    half = _stream(_chunk("ab", None), _chunk("c", "length"), *usage)
    assert set(answer_facts("s", apart)) == set(answer_facts("s", together)) == set(answer_facts("s", half))


def test_another_reason_or_another_field_is_a_difference() -> None:
    facts = set(answer_facts("s", _stream(_chunk("a", None), _chunk("b", "length"))))
    assert facts != set(answer_facts("s", _stream(_chunk("a", None), _chunk("b", "stop"))))
    assert facts != set(answer_facts("s", _stream(_chunk("a", None), {**_chunk("b", "length"), "id": "x"})))
