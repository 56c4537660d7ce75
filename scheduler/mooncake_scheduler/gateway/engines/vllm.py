"""vLLM's two legs over MooncakeConnector and NixlConnector; the simulated engine speaks the same.

The prefill leg computes the prompt and one token, the decode leg takes the KV and goes on. What a client
sends as `kv_transfer_params` never goes on: a decode engine told to fetch from nowhere exits when its client
leaves. Sources: vLLM's docs/features/mooncake_connector_usage.md, and what real engines did when tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from mooncake_core.registry import EngineKind, Instance
from mooncake_scheduler.gateway.answers import Usage
from mooncake_scheduler.gateway.body import UNREADABLE, Body, Prompt
from mooncake_scheduler.gateway.errors import bad_request

KV_PARAMS: Final = "kv_transfer_params"

_PREFILL_DROPS: Final = frozenset(
    {
        # The prefill must end by length: ended by a stop token its KV is dropped and decode hangs (rule 1).
        "stop", "stop_token_ids", "min_tokens",
        "stream_options", "n", "best_of", "logprobs", "top_logprobs",
        # They shape tokens, and the one token of this leg is thrown away.
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar",
    }
)  # fmt: skip
_SETTLE: Final = frozenset({"prompt_logprobs", "echo", "use_beam_search", "prompt_embeds", "n", "best_of"})
"""Fields that `must_stay_whole` looks at."""
_EXTRA: Final = "vllm_xargs"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CLIENT_KV: Final = frozenset({KV_PARAMS})
_NIXL_PREFILL: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_HANDING_OVER: Final = frozenset({"MooncakeConnector", "NixlConnector"})


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_ANSWER = msgspec.json.Decoder(_Answer)


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What the prefill leg brought."""

    prompt_tokens: int
    cached_tokens: int | None
    """Tokens it did not compute; None when it does not say."""
    by_length: bool
    """It ended by length, so its KV is staged."""
    kv_transfer_params: bytes
    """As it came, JSON; `null` where the connector returns none."""


def pairs(prefill: Instance, decode: Instance) -> bool:
    """Whether one can hand over to the other: same connector, engine, version and block size.

    NIXL refuses a handshake between versions; Mooncake needs one KV layout.
    """
    return (
        prefill.connector in _HANDING_OVER
        and prefill.connector == decode.connector
        and prefill.engine == decode.engine
        and prefill.engine in (EngineKind.VLLM, EngineKind.SIMULATED)
        and prefill.engine_version == decode.engine_version
        and prefill.block_size_tokens == decode.block_size_tokens
    )


def must_stay_whole(body: Body, prompt: Prompt | None) -> bool:
    """Whether a request must be served by one engine from start to end.

    Several samples or prompts would take the same staged KV several times; the logprobs of a prompt exist
    only where it was computed, and asking decode for them crashes it (vllm#50792).
    """
    if prompt is Prompt.BATCH:
        return True
    fields = body.fields
    if _SETTLE.isdisjoint(fields):
        return False
    if "prompt_logprobs" in fields and body.raw("prompt_logprobs") is not None:
        return True
    if "echo" in fields and body.flag("echo"):
        return True
    if "use_beam_search" in fields and body.flag("use_beam_search"):
        return True
    if "prompt_embeds" in fields and body.raw("prompt_embeds") is not None:
        return True
    return any(field in fields and (body.integer(field) or 1) > 1 for field in ("n", "best_of"))


def check_extra_arguments(body: Body) -> None:
    """Refuse transfer parameters among vLLM's extra arguments, the other way to them.

    An engine that serves from start to end answers it with 500 (tried on 0.32), which counts as its fault.

    Raises:
        ErrorAnswer: 400, names the field.
    """
    raw = body.raw(_EXTRA) if _EXTRA in body.fields else None
    if raw is None:
        return
    try:
        extra = _FIELDS.decode(raw)
    except UNREADABLE:
        raise bad_request(f"{_EXTRA}: an object is expected", _EXTRA) from None
    if KV_PARAMS in extra:
        raise bad_request(f"{_EXTRA}.{KV_PARAMS} is not for clients: leave it out", _EXTRA)


def prefill_body(body: Body, connector: str, transfer_id: str, put: Mapping[str, bytes]) -> bytes:
    """Body of the prefill leg.

    Args:
        body: the client's.
        connector: of both engines.
        transfer_id: names the staged KV (Mooncake); unique for each attempt.
        put: fields that replace the client's, the tokenised prompt above all.
    """
    if connector == "MooncakeConnector":
        params = (
            b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}' % transfer_id.encode()
        )
    else:
        params = _NIXL_PREFILL
    fields = {**put, "max_tokens": b"1", "stream": b"false", "ignore_eos": b"true", KV_PARAMS: params}
    if "max_completion_tokens" in body.fields:
        fields["max_completion_tokens"] = b"1"
    return body.rewritten(_PREFILL_DROPS, fields)


def release_body(
    body: Body,
    prefill: Instance,
    transfer_id: str,
    engine_id: str,
    answer: PrefillAnswer,
    put: Mapping[str, bytes],
) -> bytes:
    """Body of a leg that only takes the KV staged by `prefill`, so that it is freed there.

    Args: as for `decode_body`. One token is the least an engine computes.
    """
    fields = {
        **put,
        "max_tokens": b"1",
        "stream": b"false",
        KV_PARAMS: _take_params(prefill, transfer_id, engine_id, answer),
    }
    if "max_completion_tokens" in body.fields:
        fields["max_completion_tokens"] = b"1"
    return body.rewritten(_PREFILL_DROPS, fields)


def decode_body(
    body: Body,
    prefill: Instance,
    transfer_id: str,
    engine_id: str,
    answer: PrefillAnswer,
    put: Mapping[str, bytes],
) -> bytes:
    """Body of the decode leg, which takes the KV staged by `prefill`.

    Args:
        body: the client's.
        prefill: who staged the KV.
        transfer_id: as in the prefill leg.
        engine_id: of `prefill`, as its bootstrap server tells it (Mooncake).
        answer: of the prefill leg; NIXL's parameters go on unchanged.
        put: as for the prefill leg.
    """
    return body.extended({**put, KV_PARAMS: _take_params(prefill, transfer_id, engine_id, answer)})


def _take_params(prefill: Instance, transfer_id: str, engine_id: str, answer: PrefillAnswer) -> bytes:
    if prefill.connector != "MooncakeConnector":
        return answer.kv_transfer_params
    return msgspec.json.encode(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": prefill.bootstrap_url,
            "remote_engine_id": engine_id,
            "transfer_id": transfer_id,
        }
    )


def whole_body(body: Body, put: Mapping[str, bytes]) -> bytes:
    """Body for an engine that serves the request from start to end."""
    if KV_PARAMS in body.fields:
        return body.rewritten(_CLIENT_KV, put)
    return body.extended(put)


def read_prefill_answer(data: bytes) -> PrefillAnswer:
    """Read the prefill leg's answer.

    Raises:
        ValueError: it is not what an engine answers.
    """
    try:
        answer = _ANSWER.decode(data)
    except UNREADABLE as error:
        raise ValueError(f"the prefill's answer cannot be read: {error}") from None
    usage = answer.usage or Usage()
    return PrefillAnswer(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        by_length=bool(answer.choices) and answer.choices[0].finish_reason == "length",
        kv_transfer_params=bytes(answer.kv_transfer_params),
    )
