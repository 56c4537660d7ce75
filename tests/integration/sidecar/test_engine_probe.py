"""What the sidecar makes of an engine's answers, the strange ones too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mooncake_sidecar.engine.engine_probe import EngineProbe, EventSource

GOOD = {
    "/v1/models": (200, '{"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 4096}]}'),
    "/version": (200, '{"version": "0.32.0"}'),
    "/metrics": (200, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="200"} 1.0\n'),
    "/kv_event_sources": (200, '{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": null}}'),
}


@asynccontextmanager
async def engine(**answers: tuple[int, str]) -> AsyncIterator[EngineProbe]:
    """A probe of an engine that answers so; paths by their last part."""
    told = GOOD | {path: answers[key] for path in GOOD if (key := path.rpartition("/")[2]) in answers}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = told[head.split()[1].decode()]
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
        )
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    probe = EngineProbe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield probe
    await probe.close()
    server.close()


async def test_an_engine_says_what_it_is_and_where_it_publishes() -> None:
    async with engine() as probe:
        facts = await probe.facts()
    assert (facts.version, facts.model_root, facts.max_model_len_tokens) == ("0.32.0", "/models/tiny", 4096)
    assert (facts.block_size_tokens, facts.kv_blocks) == (16, 200)
    assert facts.events == EventSource("tcp://127.0.0.1:5557", None)


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("models", '{"data": ["tiny"]}', r"/v1/models: .*data\[0\]"),
        ("models", '{"data": [{"id": "tiny", "max_model_len": "long"}]}', r"/v1/models: .*max_model_len"),
        ("models", '{"data": []}', "/v1/models: no model"),
        ("models", "[]", "/v1/models: .*array"),
        ("version", '"0.32"', "/version: "),
        ("kv_event_sources", '{"0": "tcp://*:5557"}', "/kv_event_sources: "),
        ("kv_event_sources", '{"0": {"endpoint": 5557}}', r"/kv_event_sources: .*endpoint"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_named_and_asked_for_again_later(
    path: str, body: str, names: str
) -> None:
    async with engine(**{path: (200, body)}) as probe:
        with pytest.raises(ConnectionError, match=names):
            await probe.facts()


async def test_only_an_engine_without_such_a_path_is_taken_to_publish_nothing() -> None:
    async with engine(kv_event_sources=(404, "")) as old:
        assert (await old.facts()).events is None
    async with engine(kv_event_sources=(500, "")) as troubled:
        with pytest.raises(ConnectionError, match=r"/kv_event_sources: .*500"):
            await troubled.facts()
        assert (await troubled.facts(ask_events=False)).events is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many", ""])
async def test_a_load_that_is_no_number_is_no_load(value: str) -> None:
    async with engine(metrics=(200, f"vllm:num_requests_running {value}\n")) as probe:
        with pytest.raises(ConnectionError, match=r"/metrics: .*num_requests_running"):
            await probe.load()


async def test_samples_are_read_with_any_labels_and_with_times_behind_them() -> None:
    text = (
        'vllm:num_requests_running{model_name="a } b"} 2.0 1700000000000\n'
        'vllm:num_requests_running{model_name="c"} 1\n'
        "vllm:num_requests_running_total 9\n"
        "vllm:num_requests_waiting 3 1700000000000\n"
    )
    async with engine(metrics=(200, text)) as probe:
        load = await probe.load()
    assert (load.running, load.waiting, load.is_told) == (3, 3, True)
