"""Sends a trace's requests at its times, divided by the speed, and gathers what becomes of them."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

import msgspec

from mooncake_simulator.workloads import Request, Vocabulary, prompt_json_parts
from mooncakectl.replay.exchange import exchange
from mooncakectl.replay.outcome import Outcome, OutcomeKind, classify
from mooncakectl.replay.result import ReplayResult, summarise
from mooncakectl.replay.target import Target, find_target

_BUILT_AHEAD: Final = 32
_BLOCKS_IN_A_BITE: Final = 4
_REST_OF_BODY: Final = (
    b',"max_tokens":%d,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}'
)


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to replay."""

    url: str
    model: str | None = None
    """None: the first model that the server lists."""
    api_key: str | None = None
    speed: float = 1.0
    """Trace seconds that pass in one wall second."""
    seed: int = 0
    """Which tokens stand for the trace's blocks: another seed shares no prefix with this one."""
    vocabulary_size: int = 32_000
    timeout_s: float = 600.0
    """Wall seconds from sending a request until it counts as lost."""
    concurrency_cap: int | None = None
    """Most requests under way at once; the rest wait (and are late). None: no cap, as users behave."""
    slo_ttft_s: float = 30.0
    """Model seconds, as `slo_tbt_s`; the defaults are those of FAST'25 §5.1."""
    slo_tbt_s: float = 0.1


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a replay is."""

    total: int
    sent: int
    ended: dict[OutcomeKind, int]

    @property
    def done(self) -> int:
        """Requests that came to their end."""
        return sum(self.ended.values())


async def replay(
    trace: Sequence[Request],
    options: ReplayOptions,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> ReplayResult:
    """Replay a trace against a server.

    Args:
        trace: the requests, in any order; they are sent in that of their timestamps.
        options: where to and how.
        on_progress: called whenever a request was sent or ended.
        stop: set, it ends the replay at once; what is under way counts as interrupted.

    Raises:
        TargetError: there is no usable server at the URL.
        ValueError: an option is out of range.
    """
    if not options.speed > 0:
        raise ValueError(f"speed {options.speed:g}: expected more than 0 trace seconds per wall second")
    target = await find_target(options.url, options.model, options.api_key)
    run = _Run(target, options, sorted(trace, key=lambda request: request.timestamp_ms), on_progress)
    await run.until_done(stop or asyncio.Event())
    return summarise(
        run.outcomes,
        slo_ttft_s=options.slo_ttft_s,
        slo_tbt_s=options.slo_tbt_s,
        time_scale=target.time_scale,
        speed=options.speed,
        late_s=run.late_s,
        model=target.model,
        run=run.name,
    )


class _Run:
    def __init__(
        self,
        target: Target,
        options: ReplayOptions,
        trace: Sequence[Request],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._target = target
        self._options = options
        self._trace = trace
        self._on_progress = on_progress
        self._vocabulary = Vocabulary(options.vocabulary_size, options.seed)
        self._model = msgspec.json.encode(target.model)
        self._places = asyncio.Semaphore(options.concurrency_cap) if options.concurrency_cap else None
        self._under_way: dict[asyncio.Task[None], tuple[int, float]] = {}
        self._ended: Counter[OutcomeKind] = Counter()
        self._sent = 0
        self._broken: Exception | None = None
        self.name = secrets.token_hex(4)
        self.outcomes: list[Outcome] = []
        self.late_s = 0.0

    async def until_done(self, stop: asyncio.Event) -> None:
        sending = asyncio.create_task(self._send_all())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            rest: asyncio.Future[Any] = asyncio.gather(*self._under_way, return_exceptions=True)
            await asyncio.wait((rest, stopping), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await self._interrupt(sending, stopping)
        if self._broken is not None:
            raise self._broken

    async def _send_all(self) -> None:
        built: asyncio.Queue[list[bytes]] = asyncio.Queue(_BUILT_AHEAD)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._build_all(built))
            group.create_task(self._send_built(built))

    async def _build_all(self, built: asyncio.Queue[list[bytes]]) -> None:
        """Make the bodies ahead of their time, in small bites: tokens of other requests arrive meanwhile."""
        for request in self._trace:
            body = [b'{"model":%b,"prompt":' % self._model]
            for place, part in enumerate(prompt_json_parts(request, self._vocabulary)):
                body.append(part)
                if place % _BLOCKS_IN_A_BITE == 0:
                    await asyncio.sleep(0)
            body.append(_REST_OF_BODY % request.output_length)
            await built.put([b"".join(body)])

    async def _send_built(self, built: asyncio.Queue[list[bytes]]) -> None:
        begin_s = 0.0
        for index, request in enumerate(self._trace):
            body = await built.get()
            if index == 0:
                begin_s = monotonic()
            since_first_s = (request.timestamp_ms - self._trace[0].timestamp_ms) / 1000
            due_s = begin_s + since_first_s / self._options.speed
            await asyncio.sleep(max(0.0, due_s - monotonic()))
            if self._places is not None:
                await self._places.acquire()
            now_s = monotonic()
            self.late_s = max(self.late_s, now_s - due_s)
            task = asyncio.create_task(self._one(index, body))
            self._under_way[task] = (index, now_s)
            self._sent += 1
            self._report()

    async def _one(self, index: int, body: list[bytes]) -> None:
        try:
            request = self._target.completion(f"replay-{self.name}-{index}", body)
            answer = await exchange(self._target.endpoint, request, self._options.timeout_s)
            self._end(classify(index, answer))
        except Exception as error:
            # Whatever the server does has an outcome: this is a fault of the client, and spoils the replay.
            self._broken = self._broken or error
            raise
        finally:
            if self._places is not None:
                self._places.release()
            task = asyncio.current_task()
            if task is not None:
                self._under_way.pop(task, None)

    async def _interrupt(self, *others: asyncio.Task[object]) -> None:
        left = dict(self._under_way)
        for task in (*others, *left):
            task.cancel()
        await asyncio.gather(*others, *left, return_exceptions=True)
        now_s = monotonic()
        for index, started_s in left.values():
            self._end(
                Outcome(
                    index=index,
                    kind=OutcomeKind.INTERRUPTED,
                    reason="stopped",
                    started_s=started_s,
                    ended_s=now_s,
                )
            )

    def _end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._ended[outcome.kind] += 1
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(total=len(self._trace), sent=self._sent, ended=dict(self._ended)))
