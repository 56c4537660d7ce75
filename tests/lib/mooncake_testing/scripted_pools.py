"""A gateway in front of pools of scripted engines, and what an error of it has to look like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mooncake_core.registry import Role
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.scripted_engine import ScriptedEngine, engines

MOONCAKE = "MooncakeConnector"


@asynccontextmanager
async def pools(
    folder: Path,
    connector: str = MOONCAKE,
    *,
    prefill: int = 1,
    decode: int = 1,
    both: int = 0,
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, list[ScriptedEngine], list[ScriptedEngine]]]:
    """Prefill and decode engines; with `both`, coupled ones instead (they come as the second list)."""
    first, second = [], [ScriptedEngine(f"b{n}") for n in range(both)]
    if not both:
        first = [ScriptedEngine(f"p{n}", Role.PREFILL, connector) for n in range(prefill)]
        second = [ScriptedEngine(f"d{n}", Role.DECODE, connector) for n in range(decode)]
    async with (
        engines(*first, *second),
        gateway(folder, [engine.instance() for engine in (*first, *second)], **settings) as running,
    ):
        yield running, first, second


@asynccontextmanager
async def pair(
    folder: Path,
    connector: str = MOONCAKE,
    *,
    cached_tokens: tuple[int, int] | None = None,
    decode: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, ScriptedEngine, ScriptedEngine]]:
    """One prefill and one decode engine.

    Args:
        folder: for the gateway's files.
        connector: over which they exchange KV.
        cached_tokens: what either says that it found in its cache.
        decode: fields of the decode engine's registration.
        settings: of the gateway.
    """
    found = cached_tokens or (0, 0)
    first = ScriptedEngine("p", Role.PREFILL, connector, cached_tokens=found[0])
    second = ScriptedEngine("d", Role.DECODE, connector, cached_tokens=found[1])
    async with (
        engines(first, second),
        gateway(folder, [first.instance(), second.instance(**(decode or {}))], **settings) as running,
    ):
        yield running, first, second


def is_error(answer: Any, status: int) -> dict[str, Any]:
    """The error of an OpenAI-shaped answer that names no worker."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "127.0.0.1" not in answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) >= {"message", "type", "code", "param"}
    return error
