"""Replay against a real HTTP server that does what the script says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_simulator.workloads import Request, Vocabulary, prompt_tokens
from mooncake_testing.openai_server import Answer, OpenAIServer, Received
from mooncakectl.console import CommandError
from mooncakectl.replay import Progress, ReplayOptions, ReplayResult, TargetError, replay


def trace(count: int, *, every_ms: float = 0, tokens: int = 4, input_length: int = 600) -> list[Request]:
    return [
        Request(
            timestamp_ms=number * every_ms,
            input_length=input_length,
            output_length=tokens,
            hash_ids=(0, number + 1),
        )
        for number in range(count)
    ]


async def replayed(
    script: Callable[[Received], Answer], requests: list[Request], **options: Any
) -> tuple[ReplayResult, OpenAIServer]:
    async with OpenAIServer(script) as server:
        return await replay(requests, ReplayOptions(url=server.url, **options)), server


async def test_a_trace_is_sent_as_streamed_token_prompts_of_its_lengths() -> None:
    requests = trace(3, tokens=5)
    result, server = await replayed(lambda received: Answer(cached_tokens=512), requests, seed=7)
    assert (result.completed, result.requests) == (3, 3)
    assert result.completion_tokens == 15
    assert result.prompt_tokens == 1800
    assert result.token_hit_rate == pytest.approx(512 / 600)
    assert result.goodput == 1.0
    by_id = {received.headers["x-request-id"]: received.body for received in server.received}
    for index, request in enumerate(requests):
        body = by_id[f"replay-{result.run}-{index}"]
        assert body["prompt"] == prompt_tokens(request, Vocabulary(seed=7)).tolist()
        assert body == {
            "model": "scripted",
            "prompt": body["prompt"],
            "max_tokens": 5,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def test_requests_are_sent_at_the_times_of_the_trace_divided_by_the_speed() -> None:
    _, server = await replayed(lambda received: Answer(), trace(5, every_ms=1000), speed=10)
    first_s = server.received[0].at_s
    offsets = [received.at_s - first_s for received in server.received]
    assert offsets == sorted(offsets)
    assert all(offset > number * 0.1 - 0.02 for number, offset in enumerate(offsets))


async def test_refusals_count_by_their_reason() -> None:
    reasons = ["ttft", "ttft", "tbt"]

    def script(received: Received) -> Answer:
        if received.index < 3:
            code = reasons[received.index]
            return Answer(status=429, error={"type": "overloaded", "code": code, "message": "later"})
        return Answer(status=429) if received.index == 3 else Answer()

    result, _ = await replayed(script, trace(6))
    assert (result.completed, result.refused, result.failed, result.lost) == (2, 4, 0, 0)
    assert result.refused_by_reason == {"ttft": 2, "tbt": 1, "429": 1}
    assert result.goodput == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(status=503, error={"message": "x", "code": "no_instance"}), "503 no_instance"),
        (Answer(status=500), "500"),
        (Answer(error_after=2), "stream engine_died"),
        (Answer(error_after=0), "stream engine_died"),
        (Answer(finish_reason="abort"), "finish abort"),
    ],
)
async def test_an_explicit_error_is_a_failure_by_its_code(answer: Answer, reason: str) -> None:
    result, _ = await replayed(lambda received: answer, trace(1))
    assert result.failed_by_reason == {reason: 1}
    assert (result.failed, result.lost, result.completed) == (1, 0, 0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(die_after=2), "cut"),
        (Answer(die_after=0), "cut"),
        (Answer(raw=b""), "no_answer"),
        (Answer(raw=b"220 mail.example ESMTP\r\n"), "not_http"),
        (Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), "ended_without_finish"),
        (Answer(done=False), "ended_without_finish"),
        (Answer(finish_reason=None), "ended_without_finish"),
        (Answer(tokens=0, usage=False), "ended_without_finish"),
        (Answer(hang=True), "timeout"),
        (Answer(gap_s=60), "timeout"),
    ],
)
async def test_an_answer_that_stops_without_saying_why_is_lost(answer: Answer, reason: str) -> None:
    result, _ = await replayed(lambda received: answer, trace(1), timeout_s=0.3)
    assert result.lost_by_reason == {reason: 1}
    assert (result.lost, result.completed) == (1, 0)
    assert result.goodput == 0


async def test_a_server_that_goes_away_loses_what_was_sent_to_it() -> None:
    server = OpenAIServer(lambda received: Answer())
    async with server:
        options = ReplayOptions(url=server.url)
        running = asyncio.create_task(replay(trace(2, every_ms=300), options))
        await server.until_received(1)
    result = await running
    assert result.lost_by_reason["no_connection"] == 1


@pytest.mark.parametrize(
    "answer", [Answer(crlf=True), Answer(piece_bytes=7), Answer(crlf=True, piece_bytes=1)]
)
async def test_a_stream_may_be_cut_anywhere(answer: Answer) -> None:
    result, _ = await replayed(lambda received: answer, trace(2, tokens=9))
    assert result.completed == 2
    assert result.completion_tokens == 18


async def test_an_event_with_a_name_and_comments_between_are_read() -> None:
    lines = (
        b": keep-alive\n\n"
        b'event: token\ndata: {"choices":[{"text":"x","finish_reason":"stop"}]}\n\n'
        b": keep-alive\n\n"
        b"data: [DONE]\n\n"
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(lines)
    result, _ = await replayed(lambda received: Answer(raw=head + lines), trace(1))
    assert result.completed == 1
    assert result.ttft.p50_s is not None
    assert result.token_hit_rate is None


async def test_latencies_are_those_of_the_stream_in_model_seconds() -> None:
    async with OpenAIServer(lambda received: Answer(first_after_s=0.1, gap_s=0.02), time_scale=10) as server:
        result = await replay(trace(1, tokens=5), ReplayOptions(url=server.url, slo_tbt_s=0.1))
    assert result.time_scale == 10
    assert result.ttft.p50_s is not None
    assert result.tbt.p50_s is not None
    assert result.ttft.p50_s > 0.99
    assert result.tbt.p50_s > 0.19
    assert result.goodput == 0  # the TBT, 200 model milliseconds, is above the SLO


async def test_usage_that_does_not_tell_of_the_cache_gives_no_hit_rate() -> None:
    result, _ = await replayed(lambda received: Answer(cached_tokens=None), trace(1))
    assert result.completed == 1
    assert result.token_hit_rate is None


async def test_a_cap_holds_requests_back() -> None:
    result, server = await replayed(lambda received: Answer(gap_s=0.01), trace(6), concurrency_cap=2)
    assert result.completed == 6
    assert server.most_at_once == 2
    assert result.late_s > 0


async def test_progress_is_told_and_adds_up() -> None:
    seen: list[Progress] = []
    async with OpenAIServer() as server:
        await replay(trace(4), ReplayOptions(url=server.url), seen.append)
    assert seen[-1].sent == seen[-1].done == seen[-1].total == 4
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)


async def test_a_stop_ends_at_once_and_judges_only_what_ended() -> None:
    stop = asyncio.Event()

    def script(received: Received) -> Answer:
        return Answer() if received.index == 0 else Answer(hang=True)

    async with OpenAIServer(script) as server:
        options = ReplayOptions(url=server.url)
        running = asyncio.create_task(replay(trace(50, every_ms=100), options, None, stop))
        await server.until_received(3)
        stop.set()
        result = await running
    assert result.completed == 1
    assert result.interrupted == result.requests - 1 < 49
    assert (result.lost, result.failed) == (0, 0)
    assert result.goodput == 1.0


async def test_the_key_is_sent() -> None:
    async with OpenAIServer(api_key="sesame") as server:
        result = await replay(trace(1), ReplayOptions(url=server.url, api_key="sesame"))
        assert result.completed == 1
        with pytest.raises(TargetError, match="--api-key"):
            await replay(trace(1), ReplayOptions(url=server.url))


async def test_an_unusable_target_is_refused_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TargetError, match="is a server running there"):
            await replay(trace(1), ReplayOptions(url=url))
    with pytest.raises(CommandError, match="expected something like"):
        await replay(trace(1), ReplayOptions(url="localhost:8000"))
    async with OpenAIServer() as server:
        with pytest.raises(TargetError, match="does not serve other; it serves scripted"):
            await replay(trace(1), ReplayOptions(url=server.url, model="other"))
        with pytest.raises(ValueError, match="speed 0"):
            await replay(trace(1), ReplayOptions(url=server.url, speed=0))
