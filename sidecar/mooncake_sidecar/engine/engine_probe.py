"""What the engine says of itself over HTTP: whether it lives, what it is, how loaded it is."""

from __future__ import annotations

import re
from enum import Enum
from math import isfinite
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

_NO_SUCH_PATH = frozenset({404, 405, 501})
_Document = TypeVar("_Document")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Health(Enum):
    """How an engine answers `/health`."""

    WELL = "well"
    ILL = "ill"
    """It answers with an error, or not in time."""
    DEAD = "dead"
    """Nobody listens: the process is gone, and its cache with it."""


class EventSource(NamedTuple):
    """Where an engine publishes its KV events."""

    endpoint: str
    replay_endpoint: str | None


class Facts(NamedTuple):
    """What does not change while an engine lives."""

    version: str
    max_model_len_tokens: int
    model_root: str
    """Path or name under which the engine loaded its model."""
    block_size_tokens: int
    kv_blocks: int
    """Blocks in HBM; 0 = not told."""
    events: EventSource | None


class Load(NamedTuple):
    """What the engine's metrics say at one moment."""

    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: float
    """Counted since the engine began, as all that follows."""
    cache_queries_tokens: float = 0.0
    """Looked for in its own cache and in what its connectors reach."""
    cache_hits_tokens: float = 0.0
    began_s: float = 0.0
    """Unix time at which it began to count; 0 = not told."""
    is_told: bool = True
    """Whether the engine tells metrics at all; without them all of this is 0 and means nothing."""


class EngineProbe:
    """Asks one engine.

    Args:
        url: its base URL.
        timeout_s: wall seconds for one answer.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        self._host = urlsplit(url).hostname or "127.0.0.1"
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False)

    async def health(self) -> Health:
        """Ask `/health`."""
        try:
            answer = await self._http.get("/health")
        except httpx.ConnectError:
            return Health.DEAD
        except httpx.HTTPError:
            return Health.ILL
        return Health.WELL if answer.status_code == 200 else Health.ILL

    async def facts(self, *, ask_events: bool = True) -> Facts:
        """Ask all that has to be known once.

        Args:
            ask_events: whether to ask where events are published.

        Raises:
            ConnectionError: an answer is missing or cannot be read; says which.
        """
        models = (await self._read("/v1/models", _Models)).data
        if not models:
            raise ConnectionError("/v1/models: no model is served")
        version = await self._read("/version", _Version)
        block_size, blocks = _cache_config((await self._get("/metrics")).text)
        return Facts(
            version=version.version,
            max_model_len_tokens=models[0].max_model_len or 0,
            model_root=models[0].root or models[0].id,
            block_size_tokens=block_size,
            kv_blocks=blocks,
            events=await self._event_source() if ask_events else None,
        )

    async def load(self) -> Load:
        """Read the metrics; of an engine run with `--disable-log-stats` there are none.

        Raises:
            ConnectionError: they cannot be read.
        """
        text = (await self._get("/metrics")).text
        return Load(
            running=int(_sample(text, "vllm:num_requests_running")),
            waiting=int(_sample(text, "vllm:num_requests_waiting")),
            kv_usage=_sample(text, "vllm:kv_cache_usage_perc"),
            prompt_tokens=_sample(text, "vllm:prompt_tokens_total"),
            cache_queries_tokens=_sample(text, "vllm:prefix_cache_queries_total")
            + _sample(text, "vllm:external_prefix_cache_queries_total"),
            cache_hits_tokens=_sample(text, "vllm:prefix_cache_hits_total")
            + _sample(text, "vllm:external_prefix_cache_hits_total"),
            began_s=_sample(text, "vllm:prompt_tokens_created"),
            is_told="vllm:num_requests_running" in text,
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def _event_source(self) -> EventSource | None:
        """Ask where events are published; engines before vLLM 0.31 cannot tell."""
        try:
            sources = await self._read("/kv_event_sources", dict[str, _EventSource])
        except ConnectionError as error:
            # Any other failure says nothing of events, and would hide the engine's cache for all its life.
            refusal = error.__cause__
            if isinstance(refusal, httpx.HTTPStatusError) and refusal.response.status_code in _NO_SUCH_PATH:
                return None
            raise
        source = sources.get("0")
        if source is None or not source.endpoint or not source.enable_kv_cache_events:
            return None
        replay = source.replay_endpoint
        return EventSource(self._reachable(source.endpoint), self._reachable(replay) if replay else None)

    def _reachable(self, endpoint: str) -> str:
        """An endpoint as it was bound, as it can be connected to."""
        for everywhere in ("*", "0.0.0.0", "[::]"):
            endpoint = endpoint.replace(f"//{everywhere}:", f"//{self._host}:")
        return endpoint

    async def _read(self, path: str, kind: type[_Document]) -> _Document:
        answer = await self._get(path)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"{path}: {error}") from error

    async def _get(self, path: str) -> httpx.Response:
        try:
            answer = await self._http.get(path)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ConnectionError(f"{path}: {error!r}") from error
        return answer


class _Model(msgspec.Struct):
    id: str = ""
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = ""


class _EventSource(msgspec.Struct):
    endpoint: str | None = None
    enable_kv_cache_events: bool = True
    replay_endpoint: str | None = None


def _sample(text: str, name: str) -> float:
    """A metric's samples added up, 0 without any. Far quicker than a parser, and asked every second.

    Raises:
        ConnectionError: a sample has no value that is a number.
    """
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            # Behind the value may stand a time, and in labels anything.
            value = line[max(len(name), line.rfind("}") + 1) :].split()[:1]
            try:
                total += float(value[0])
            except (IndexError, ValueError):
                raise ConnectionError(f"/metrics: {line[:200]!r} has no value") from None
    if not isfinite(total):
        raise ConnectionError(f"/metrics: {name} is {total}")
    return total


def _cache_config(text: str) -> tuple[int, int]:
    """Block size in tokens and number of blocks; 0 where the engine does not say."""
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(_LABEL.findall(line))
            return _count(labels.get("block_size")), _count(labels.get("num_gpu_blocks"))
    return 0, 0


def _count(label: str | None) -> int:
    return int(label) if label is not None and label.isdecimal() else 0
