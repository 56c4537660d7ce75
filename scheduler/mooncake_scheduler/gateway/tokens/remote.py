"""The engines' own `/tokenize`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

from mooncake_scheduler.gateway.body import UNREADABLE
from mooncake_scheduler.gateway.http1 import Upstream
from mooncake_scheduler.gateway.http1.simple import fetch

TIMEOUT_S = 10.0
_PASSED = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs",
)  # fmt: skip


class _Answer(msgspec.Struct):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_Answer)


class TokenizeRefusedError(ConnectionError):
    """An engine answered `/tokenize` with something else than tokens.

    Args:
        url: of the engine.
        status: HTTP status of its answer.
    """

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url}/tokenize: status {status}")
        self.status = status


async def tokenize(upstream: Upstream, fields: Mapping[str, bytes | msgspec.Raw]) -> array[int]:
    """Ask an engine for the ids of a prompt or chat.

    Args:
        upstream: the engine.
        fields: of the request, encoded; those that `/tokenize` knows are sent.

    Raises:
        TokenizeRefusedError: it does not offer it, or refuses.
        ConnectionError: it does not answer.
    """
    sent = {name: fields[name] for name in ("model", "prompt", *_PASSED) if name in fields}
    body = msgspec.json.encode({name: msgspec.Raw(bytes(value)) for name, value in sent.items()})
    status, answer = await fetch(upstream, b"POST", b"/tokenize", body=body, timeout_s=TIMEOUT_S)
    if status != 200:
        raise TokenizeRefusedError(upstream.url, status)
    try:
        return array("I", _ANSWER.decode(answer).tokens)
    except (*UNREADABLE, OverflowError) as error:
        raise ConnectionError(f"{upstream.url}/tokenize: {error}") from None
