"""Whether the gateway and an engine tokenise alike: three chats, compared when an instance registers."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from mooncake_scheduler.gateway.http1 import Upstream
from mooncake_scheduler.gateway.tokens.folder import ModelFolder, TemplateFailedError
from mooncake_scheduler.gateway.tokens.remote import TokenizeRefusedError, tokenize

_WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place & its «surroundings»",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CHATS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"messages": [{"role": "user", "content": "Hello! What is 2 + 2?"}]},
    "tools": {"messages": [{"role": "user", "content": "Weather in Zürich?"}], "tools": [_WEATHER]},
    "multi-turn": {
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "First question\n\nin two lines"},
            {"role": "assistant", "content": " An answer.  "},
            {"role": "user", "content": "第二个问题?"},
        ]
    },
}


async def mismatch(folder: ModelFolder, upstream: Upstream, model: str) -> str:
    """Compare; returns in which chat they differ, empty when they agree.

    A chat that both refuse counts as equal. An engine that does not offer `/tokenize` at all cannot be
    compared, and counts as equal too.

    Raises:
        ConnectionError: the engine cannot be reached.
    """
    for name, chat in CHATS.items():
        fields = {key: msgspec.json.encode(value) for key, value in (chat | {"model": model}).items()}
        try:
            theirs = list(await tokenize(upstream, fields))
        except TokenizeRefusedError as refused:
            if refused.status == 404:
                return ""
            if not 400 <= refused.status < 500:
                raise
            theirs = None
        try:
            ours = await asyncio.to_thread(_ours, folder, chat)
        except TemplateFailedError:
            ours = None
        if ours != theirs:
            return f"the {name} chat has {_count(ours)} here and {_count(theirs)} at the engine"
    return ""


def _ours(folder: ModelFolder, chat: dict[str, Any]) -> list[int]:
    return folder.encode(folder.render(chat["messages"], chat.get("tools")), add_special_tokens=False)


def _count(ids: list[int] | None) -> str:
    return "an error" if ids is None else f"{len(ids)} tokens"
