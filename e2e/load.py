"""A steady load of streamed completions, each of which must come to its end as it was promised.

Nothing is tried again: what one attempt does not bring is a failure of the service. Half of the clients open
a connection for each request, as short-lived programs do; the other half keep theirs, as SDKs do.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import httpx
import msgspec

from e2e.kube import PATIENCE_S

_PROMPT_TOKENS = 1500
"""Three blocks of the quickstart's 512."""
_SHORT_TOKENS, _LONG_TOKENS = 40, 300
_LONG_EVERY = 4
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and what became of it. Times are Unix seconds."""

    request_id: str
    started_s: float
    ended_s: float
    tokens: int
    wrong: str
    """What was not as promised; empty = all was."""


class Load:
    """Clients that send one request after another until they are told to stop.

    ``async with Load(url, "llama3-70b") as load`` starts them; leaving lets the streams under way end.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        clients: int = 6,
        pause_s: float = 0.5,
        on_done: Callable[[Sent], Awaitable[None]] | None = None,
    ) -> None:
        """Take where to and how much.

        Args:
            url: of the service.
            model: to ask for.
            clients: requests at a time.
            pause_s: between an answer and the client's next request.
            on_done: told of each request, beside the others.
        """
        self._url = url
        self._model = model
        self._clients = clients
        self._pause_s = pause_s
        self._on_done = on_done
        self._stopping = asyncio.Event()
        self._working: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self.sent: list[Sent] = []
        self._told = 0
        self.under_way = 0

    async def __aenter__(self) -> Self:
        self._working = [asyncio.create_task(self._client(n)) for n in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Send nothing more, and wait for what is under way."""
        self._stopping.set()
        await asyncio.gather(*self._working)
        await asyncio.gather(*self._telling)

    async def more(self, requests: int, within_s: float = PATIENCE_S) -> None:
        """Wait until so many more requests have been answered well.

        Raises:
            AssertionError: one was not, or time is over.
        """
        wanted = len(self.sent) + requests
        end = time.monotonic() + within_s
        while len(self.sent) < wanted:
            self.must_hold()
            assert time.monotonic() < end, f"{wanted - len(self.sent)} answers missing after {within_s:.0f} s"
            await asyncio.sleep(0.1)
        self.must_hold()

    def must_hold(self) -> None:
        """Fail where a request was not answered as promised; once for each, so that tests are their own."""
        told, self._told = self._told, len(self.sent)
        wrong = [each for each in self.sent[told:] if each.wrong]
        assert not wrong, f"{len(wrong)} of {len(self.sent)} requests: {wrong[:5]}"

    async def _client(self, number: int) -> None:
        keeps = number % 2 == 0
        kept = _client() if keeps else None
        try:
            for turn in range(1 << 30):
                if self._stopping.is_set():
                    return
                # Most are short; some last longer than a step of a rollout, so that drains have to wait.
                tokens = _LONG_TOKENS if (turn + number) % _LONG_EVERY == 0 else _SHORT_TOKENS
                await self._one(kept, tokens)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._pause_s)
        finally:
            if kept is not None:
                await kept.aclose()

    async def _one(self, kept: httpx.AsyncClient | None, tokens: int) -> None:
        request_id = f"e2e-{uuid.uuid4().hex[:12]}"
        started_s = time.time()
        self.under_way += 1
        client = kept or _client()
        try:
            came, wrong = await stream(client, self._url, self._model, request_id, tokens)
        finally:
            self.under_way -= 1
            if kept is None:
                await client.aclose()
        sent = Sent(request_id, started_s, time.time(), came, wrong)
        self.sent.append(sent)
        if self._on_done is not None:
            # Explanations are fetched beside the load, not instead of it.
            telling = asyncio.create_task(self._tell(sent, self._on_done))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    @staticmethod
    async def _tell(sent: Sent, on_done: Callable[[Sent], Awaitable[None]]) -> None:
        await on_done(sent)


async def stream(
    client: httpx.AsyncClient, url: str, model: str, request_id: str, tokens: int
) -> tuple[int, str]:
    """One streamed completion of a prompt of its own.

    Returns:
        How many tokens came, and what was not as promised (empty = all was).
    """
    first = uuid.uuid4().int % 30_000
    body = {
        "model": model,
        "prompt": [first, *range(1, _PROMPT_TOKENS)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-request-id": request_id}
    events: list[bytes] = []
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return 0, f"HTTP {answer.status_code}: {(await answer.aread()).decode()[:500]}"
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: ").encode())
    except httpx.HTTPError as error:
        return len(events), f"{type(error).__name__}: {error} after {len(events)} events"
    return _judged(events, tokens)


def _judged(events: Sequence[bytes], tokens: int) -> tuple[int, str]:
    if not events or events[-1] != b"[DONE]":
        return len(events), f"the stream ended without [DONE], after {events[-1:]}"
    decoded: list[dict[str, Any]] = [msgspec.json.decode(event) for event in events[:-1]]
    errors = [event["error"] for event in decoded if "error" in event]
    finished = [choice["finish_reason"] for event in decoded for choice in event.get("choices", ())]
    came = next((e["usage"]["completion_tokens"] for e in reversed(decoded) if e.get("usage")), 0)
    if errors:
        return came, f"an error in the stream: {errors[0]}"
    if came != tokens or "length" not in finished:
        return came, f"{came} of {tokens} tokens came, finish reasons {set(finished)}"
    return came, ""


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
