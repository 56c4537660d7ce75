from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_scheduler.gateway.answers import (
    EventStream,
    error_of,
    usage_of,
    with_cached_tokens,
    without_kv_params,
)
from mooncake_scheduler.gateway.body import _NAMES, Body, Prompt, prompt_form
from mooncake_scheduler.gateway.errors import ErrorAnswer
from mooncake_scheduler.gateway.job import read_wish
from mooncake_scheduler.gateway.recent import RecentDispatches, common_blocks
from mooncake_scheduler.gateway.tokens.tokens import _is_text

names = st.text(min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(names, values, max_size=6)
fields = st.dictionaries(names, values, max_size=3)


@given(
    document=documents, put=st.dictionaries(names, values, max_size=3), drop=st.frozensets(names, max_size=3)
)
def test_a_rewritten_body_is_the_old_one_with_fields_dropped_and_set(
    document: dict[str, Any], put: dict[str, Any], drop: frozenset[str]
) -> None:
    body = Body(json.dumps(document).encode())
    encoded = {name: json.dumps(value).encode() for name, value in put.items()}
    expected = {name: value for name, value in document.items() if name not in drop} | put
    assert json.loads(body.rewritten(drop, encoded)) == expected


@given(document=documents, put=fields, space=st.sampled_from(["", " \n"]))
def test_an_extended_body_is_the_old_one_with_fields_set(
    document: dict[str, Any], put: dict[str, Any], space: str
) -> None:
    body = Body((json.dumps(document) + space).encode())
    encoded = {name: json.dumps(value).encode() for name, value in put.items()}
    assert json.loads(body.extended(encoded)) == document | put


def test_what_is_not_looked_at_goes_on_byte_for_byte() -> None:
    body = Body(b'{"model": "m", "prompt" : [1,  2], "temperature":1.0e0,"max_tokens":5}')
    sent = body.rewritten(frozenset(), {"max_tokens": b"1"})
    assert b"[1,  2]" in sent
    assert b"1.0e0" in sent


def test_of_a_field_sent_twice_only_the_last_goes_on() -> None:
    body = Body(b'{"stream":true,"stream":false,"a":1}')
    assert not body.flag("stream")
    assert body.rewritten(frozenset({"a"}), {}) == b'{"stream":false}'


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"null", b'{"a":}', b"\xff", b'"x"'])
def test_a_body_that_is_no_object_is_a_bad_request(data: bytes) -> None:
    with pytest.raises(ErrorAnswer) as refused:
        Body(data)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("data", "read"),
    [(b'{"f":"x"}', "integer"), (b'{"f":1.5}', "integer"), (b'{"f":1}', "text"), (b'{"f":1}', "flag")],
)
def test_a_field_of_the_wrong_kind_is_named(data: bytes, read: str) -> None:
    with pytest.raises(ErrorAnswer) as refused:
        getattr(Body(data), read)("f")
    assert refused.value.param == "f"


@pytest.mark.parametrize(
    ("raw", "form"),
    [
        (b'"x"', Prompt.TEXT), (b"[1,2]", Prompt.IDS), (b"[]", Prompt.IDS), (b"[[1]]", Prompt.BATCH),
        (b'[ "a"]', Prompt.BATCH), (b"[ \n [1] ]", Prompt.BATCH),
    ],
)  # fmt: skip
def test_the_form_of_a_prompt_is_seen_from_its_first_bytes(raw: bytes, form: Prompt) -> None:
    assert prompt_form(raw) is form


events = st.lists(
    st.binary(max_size=12).map(lambda b: b"data: " + b.replace(b"\n", b".") + b"\n\n"), max_size=8
)


@given(
    events=events, cuts=st.lists(st.integers(0, 200), max_size=10), rest=st.sampled_from([b"", b"data: half"])
)
def test_whole_events_pass_untouched_however_they_are_cut(
    events: list[bytes], cuts: list[int], rest: bytes
) -> None:
    data = b"".join(events) + rest
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    stream = EventStream()
    out = b"".join(stream.feed(data[a:b]) for a, b in pairwise(places))
    assert out == b"".join(events)
    assert stream.events == len(events)


@pytest.mark.parametrize(
    ("data", "ended"),
    [(b"data: a\n\ndata: [DONE]\n\n", True), (b"data: a\n\n", False), (b"data: [DONE]\n\ndata: x", False)],
)
def test_a_stream_has_ended_only_with_its_mark(data: bytes, ended: bool) -> None:
    stream = EventStream()
    stream.feed(data)
    assert stream.ended == ended


def test_the_usage_is_patched_in_its_event_and_nowhere_else() -> None:
    stream = EventStream(cached_tokens=16)
    first = b'data: {"choices":[{"text":"\\"usage\\":1"}]}\n\n'
    assert stream.feed(first) == first
    last = b'data: {"choices":[],"usage":{"prompt_tokens":40,"x":1.50}}\n\ndata: [DONE]\n\n'
    out = stream.feed(last)
    assert out.endswith(b"data: [DONE]\n\n")
    patched = json.loads(out.split(b"\n\n")[0][6:])
    assert patched["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    usage = stream.last_usage()
    assert usage is not None
    assert usage.prompt_tokens == 40


@given(documents)
def test_patching_changes_nothing_but_the_cached_tokens(document: dict[str, Any]) -> None:
    details = {"a": 1, "cached_tokens": 9}
    answer = {**document, "usage": {"prompt_tokens": 3, "prompt_tokens_details": details}}
    patched = json.loads(with_cached_tokens(json.dumps(answer).encode(), 2))
    details["cached_tokens"] = 2
    assert patched == answer


def test_answers_without_usage_or_no_json_at_all_stay_as_they_are() -> None:
    for answer in (b'{"usage":null}', b"{}", b"<html>", b'{"usage":3}'):
        assert with_cached_tokens(answer, 1) == answer
    assert usage_of(b"<html>") is None
    assert without_kv_params(b'{"kv_transfer_params":{"remote_host":"h"}}') == b'{"kv_transfer_params":null}'


def test_an_error_event_is_told_from_tokens() -> None:
    assert error_of(b'data: {"choices":[]}\n\n') is None
    assert error_of(b'data: {"error":{"code":404}}\n\n') == (404, b'{"error":{"code":404}}')
    assert error_of(b'data: {"error":{"code":"x"}}\n\n') == (500, b'{"error":{"code":"x"}}')


@given(shared=st.integers(0, 30), one=st.integers(0, 10), other=st.integers(0, 10))
def test_the_blocks_two_prompts_share_are_found_by_bisection(shared: int, one: int, other: int) -> None:
    head = list(range(shared))
    keys = [head + [100 + n for n in range(one)], head + [200 + n for n in range(other)]]
    assert common_blocks(keys[0], keys[1]) == shared


def test_a_dispatch_is_believed_until_its_time_and_forgotten_with_its_instance() -> None:
    recent = RecentDispatches()
    recent.add("a", [1, 2, 3], 5.0, 0.0)
    recent.add("b", [1, 2, 9], 5.0, 0.0)
    found = recent.merge([1, 2, 3, 4], {}, 1.0)
    assert {name: depth.hbm for name, depth in found.items()} == {"a": 3, "b": 2}
    recent.forget("a")
    assert set(recent.merge([1, 2, 3, 4], {}, 1.0)) == {"b"}
    assert recent.merge([1, 2], {}, 6.0) == {}
    recent.add("c", [7], 9.0, 6.0)
    assert len(recent) == 1


def test_a_dispatch_that_is_believed_for_long_keeps_no_later_ones_in_memory() -> None:
    recent = RecentDispatches()
    recent.add("long", [1], 1_000.0, 0.0)
    for n in range(100):
        recent.add("short", [n + 2], n + 1.0, float(n))
    assert len(recent) <= 3


DEEP = b'{"prompt":[1],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "sent",
    [
        DEEP, b'{"prompt":' + b'{"a":' * 100_000, b'{"prompt":"\xff"}', b'{"a\xff":1}', b'{"prompt":NaN}',
        b'{"prompt":[1],"max_tokens":1e999}', b'{"prompt":[1],"max_tokens":' + b"9" * 400 + b"}",
        b'{"prompt":[1],"n":' + b"9" * 5000 + b"}", b'{"prompt":[1],"max_tokens":-1e300}',
        b'{"prompt":"\\ud800","model":"\\ud800"}', b"[]", b"", b"\xef\xbb\xbf{}", b'{"prompt":[1],}',
    ],
    ids=range(14),
)  # fmt: skip
def test_what_cannot_be_read_is_the_clients_mistake(sent: bytes) -> None:
    with pytest.raises(ErrorAnswer) as caught:
        read_wish(sent, chat=False)
    assert caught.value.status == 400


@given(field=st.sampled_from(["max_tokens", "n", "model", "stream", "prompt", "echo"]), value=values)
def test_any_value_of_any_field_is_read_or_the_clients_mistake(field: str, value: Any) -> None:
    status = 0
    try:
        read_wish(json.dumps({"prompt": [1, 2], field: value}).encode(), chat=False)
    except ErrorAnswer as answer:
        status = answer.status
    assert status in (0, 400)


def test_long_names_of_fields_are_not_kept() -> None:
    kept = len(_NAMES)
    Body(b'{"' + b"x" * 1000 + b'":1}').rewritten(frozenset(), {"a": b"1"})
    assert len(_NAMES) - kept <= 1


def test_parts_of_a_chat_may_be_of_any_type() -> None:
    for kind in (["text"], {"a": 1}, 5, None, "image_url"):
        assert not _is_text([{"content": [{"type": kind}]}])
    assert _is_text([{"content": [{"type": "text"}]}])
