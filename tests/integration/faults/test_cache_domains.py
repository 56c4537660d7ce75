"""Entries 13 and 14: hash seeds that differ, and prompts that look alike and are not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.blocks import block_keys
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.redis import RedisServer
from mooncake_testing.scripted_engine import ScriptedEngine, engines
from mooncake_testing.sidecars import SharedView, SidecarProcess
from mooncake_testing.simulated import Simulated
from mooncake_testing.waiting import until

PROMPT = list(range(1_000, 1_161))

# Python's hash seed, and how blocks are named in events: as vLLM lets an operator set them, to each engine.
HABITS = [
    {"PYTHONHASHSEED": "0", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1"},
    {"PYTHONHASHSEED": "4711", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1"},
    {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
]


async def test_engines_that_hash_blocks_in_their_own_way_are_known_by_the_same_keys(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    view = SharedView(redis_server)
    await view.open()
    sidecars: list[SidecarProcess] = []
    with Simulated() as simulated:
        try:
            fleet = [
                simulated.engine("--num-gpu-blocks-override", "200", events=True, environ=habits)
                for habits in HABITS
            ]
            for number, engine in enumerate(fleet):
                sidecars.append(
                    SidecarProcess(
                        tmp_path, redis_server, engine.url, instance=f"b{number}",
                        journal_dir=str(tmp_path / f"journal-{number}"),
                    )
                )  # fmt: skip
                body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
                assert (await asyncio.to_thread(engine.post, "/v1/completions", body)).status_code == 200
            names = [tuple(engine.get("/simulator/blocks")["hashes"]) for engine in fleet]
            assert len(set(names)) == 3, "the engines agree by themselves: this test tests nothing"
            keys = block_keys(PROMPT, 16)

            async def all_known() -> bool:
                found = await view.index.match(keys)
                return {name: depth.hbm for name, depth in found.items()} == {"b0": 10, "b1": 10, "b2": 10}

            await until(all_known)
        finally:
            for sidecar in sidecars:
                sidecar.end()
            await view.close()


async def believed(running: Gateway, bodies: Sequence[dict[str, Any]], path: str) -> list[int]:
    """Prefix tokens that the gateway believed to be in the cache, request after request."""
    found = []
    for body in bodies:
        answer = await running.client.post(path, json={"model": "tiny", "max_tokens": 2, **body})
        assert answer.status_code == 200, answer.text
        placement = running.scheduler.services.decisions.latest(1)[0].placement
        assert placement is not None
        found.append(placement.prefix_tokens)
    return found


@pytest.mark.parametrize(
    "others",
    [{"model": "tiny-lora"}, {"cache_salt": "one"}, {"cache_salt": "tiny-lora"}],
    ids=["another LoRA", "a salt", "a salt named as the LoRA"],
)
async def test_prompts_of_another_lora_or_salt_are_not_taken_for_each_other(
    tmp_path: Path, others: dict[str, str]
) -> None:
    engine = ScriptedEngine("b0")
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        plain, other = {"prompt": PROMPT}, {"prompt": PROMPT, **others}
        asked = [plain, plain, other, other, {"prompt": PROMPT, "model": "tiny-lora", "cache_salt": "x"}]
        assert await believed(running, asked, "/v1/completions") == [0, 160, 0, 160, 0]


async def test_two_pictures_in_the_same_words_are_not_taken_for_one(tmp_path: Path) -> None:
    def about(picture: str) -> dict[str, Any]:
        parts = [
            {"type": "text", "text": "what is this"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        ]
        return {"messages": [{"role": "user", "content": parts}]}

    engine = ScriptedEngine("b0")
    # As engines do: a picture is a row of placeholders, whatever is on it.
    engine.tokenize = lambda body: list(range(320))
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        asked = [about("AAAA"), about("BBBB")]
        assert await believed(running, asked, "/v1/chat/completions") == [0, 0]
        ask = running.scheduler.services.decisions.latest(1)[0].ask
        assert ask is not None
        assert ask.prompt_tokens == 320, "its length is known all the same"
        text_parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
        assert await believed(running, [text_parts] * 2, "/v1/chat/completions") == [0, 319]
