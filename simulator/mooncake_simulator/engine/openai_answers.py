"""Answers in vLLM's form: whole documents, and the pieces of a stream.

Field names, their order and which of them are null follow vLLM 0.32 (`entrypoints/openai/*/serving.py`).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from mooncake_simulator.engine.openai_requests import Generation

_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(document: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _json(document)


def usage(prompt: int, output: int, cached: int | None, *, whole: bool, chat: bool = False) -> dict[str, Any]:
    """The usage object; `whole` documents spell out nulls, streams leave them out.

    Chats count the cache tokens that they created, completions do not; here none are told apart.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
    }
    if whole:
        details = {
            "cached_tokens": cached,
            "created_cache_tokens": 0 if chat else None,
            "multimodal_tokens": None,
        }
        counts["prompt_tokens_details"] = details if cached is not None else None
        counts["completion_tokens_details"] = None
    elif cached is not None:
        created = {"created_cache_tokens": 0} if chat else {}
        counts["prompt_tokens_details"] = {"cached_tokens": cached, **created}
    return counts


class StreamWriter:
    """The events of one stream. What does not change from token to token is encoded once."""

    def __init__(self, request: Generation, fingerprint: str) -> None:
        self._request = request
        self._fingerprint = fingerprint
        self._head: dict[str, Any] = {
            "id": request.id,
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }
        self._plain = not request.return_token_ids and not request.continuous_usage
        opening = b"data: " + _json(self._head)[:-1]
        if request.chat:
            self._before = opening + b',"choices":[{"index":0,"delta":{"content":'
            self._after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            self._before = opening + b',"choices":[{"index":0,"text":'
            self._after = (
                b',"logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
            )
        self._first = True

    def token(self, text: str, tokens: list[int], generated: int) -> bytes:
        """The event of a token that is not the last; a chat's first one is preceded by its role."""
        opening = self._opening()
        if self._plain:
            return opening + self._before + _json(text) + self._after
        return opening + event(self._chunk(text, tokens, generated, None, None))

    def last(
        self, text: str, tokens: list[int], generated: int, reason: str, stop_reason: int | str | None
    ) -> bytes:
        """The event that carries the finish reason."""
        chunk = self._chunk(text, tokens, generated, reason, stop_reason)
        if not self._request.include_usage:
            chunk["system_fingerprint"] = self._fingerprint
        return self._opening() + event(chunk)

    def usage(self, generated: int, cached: int | None) -> bytes:
        """The closing usage event."""
        counts = usage(len(self._request.prompt), generated, cached, whole=False, chat=self._request.chat)
        return event({**self._head, "choices": [], "usage": counts, "system_fingerprint": self._fingerprint})

    def _opening(self) -> bytes:
        if not self._first:
            return b""
        self._first = False
        if not self._request.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        chunk = {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
        if self._request.continuous_usage:
            chunk["usage"] = usage(len(self._request.prompt), 0, None, whole=False)
        chunk["prompt_token_ids"] = self._request.prompt if self._request.return_token_ids else None
        chunk["prompt_text"] = None
        return event(chunk)

    def _chunk(
        self, text: str, tokens: list[int], generated: int, reason: str | None, stop_reason: int | str | None
    ) -> dict[str, Any]:
        request = self._request
        token_ids = tokens if request.return_token_ids else None
        choice: dict[str, Any] = {"index": 0}
        if request.chat:
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": reason}
            if reason is not None:
                choice["stop_reason"] = stop_reason
            choice["token_ids"] = token_ids
        else:
            prompt = request.prompt if request.return_token_ids and generated <= len(tokens) else None
            choice |= {
                "text": text,
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": stop_reason,
                "prompt_token_ids": prompt,
                "token_ids": token_ids,
            }
        chunk = {**self._head, "choices": [choice]}
        if request.continuous_usage:
            chunk["usage"] = usage(len(request.prompt), generated, None, whole=False)
        return chunk


def whole_answer(
    request: Generation,
    text: str,
    tokens: list[int],
    *,
    finish_reason: str,
    stop_reason: int | str | None,
    cached: int | None,
    fingerprint: str,
    transfer: dict[str, Any] | None,
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    token_ids = tokens if request.return_token_ids else None
    prompt_ids = request.prompt if request.return_token_ids else None
    ending = {"finish_reason": finish_reason, "stop_reason": stop_reason, "token_ids": token_ids}
    if request.chat:
        message = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        choice = {"index": 0, "message": message, "logprobs": None, **ending, "routed_experts": None}
        prompt_fields = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
    else:
        choice = {
            "index": 0,
            "text": (request.prompt_text or "") + text if request.echo else text,
            "logprobs": None,
            **ending,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "routed_experts": None,
        }
        prompt_fields = {}
    return {
        "id": request.id,
        "object": "chat.completion" if request.chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": usage(len(request.prompt), len(tokens), cached, whole=True, chat=request.chat),
        **prompt_fields,
        "kv_transfer_params": transfer,
        "ec_transfer_params": None,
        "metrics": None,
    }
