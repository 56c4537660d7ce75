"""Whatever a body says, the engine answers it or refuses it as vLLM does; it never fails on it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_simulator.engine.openai_requests import ApiError, Generation, RequestReader, decode_body
from mooncake_simulator.engine.options import parse
from mooncake_simulator.engine.tokens import codec_for

CODEC = codec_for("tiny")
OPTIONS = parse(["--model", "tiny"], {})
READER = RequestReader(OPTIONS, CODEC)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3) | VALUES}), max_size=2
)
FIELDS = {
    "model": st.just("tiny") | VALUES,
    "max_tokens": VALUES,
    "max_completion_tokens": VALUES,
    "min_tokens": VALUES,
    "n": VALUES,
    "stream": VALUES,
    "stream_options": VALUES,
    "stop": VALUES,
    "stop_token_ids": VALUES,
    "seed": VALUES,
    "cache_salt": VALUES,
    "request_id": VALUES,
    "kv_transfer_params": VALUES,
    "add_special_tokens": VALUES,
    "tools": VALUES,
    "chat_template_kwargs": VALUES | st.just({"messages": []}),
}


def read(body: dict[str, object], *, chat: bool) -> Generation | ApiError:
    try:
        told = decode_body(msgspec.json.encode(body))
        return READER.chat(told, None) if chat else READER.completion(told, None)
    except ApiError as error:
        return error


@given(body=st.fixed_dictionaries({"prompt": st.just([1, 2, 3]) | VALUES}, optional=FIELDS))
def test_any_completion_is_read_or_refused(body: dict[str, object]) -> None:
    answer = read(body, chat=False)
    assert isinstance(answer, Generation) or 400 <= answer.status < 500


@given(body=st.fixed_dictionaries({"messages": MESSAGES | VALUES}, optional=FIELDS))
@example(body={"messages": [{"role": "user", "content": ["text"]}]})
@example(body={"messages": [{"role": "user", "content": [{"text": None}]}]})
@example(body={"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"messages": []}})
def test_any_chat_is_read_or_refused(body: dict[str, object]) -> None:
    answer = read(body, chat=True)
    assert isinstance(answer, Generation) or 400 <= answer.status < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", "x"),
        ("stream_options", "x"),
        ("chat_template_kwargs", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", [[]]),
        ("request_id", 7),
        ("request_id", 7.5),
    ],
)
def test_a_field_of_another_form_is_refused_by_its_name(field: str, value: object) -> None:
    answer = read({"messages": [{"role": "user", "content": "hi"}], "stream": True, field: value}, chat=True)
    assert isinstance(answer, ApiError)
    assert (answer.status, answer.param) == (400, field)
