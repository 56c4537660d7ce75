"""What the `openai` package understands of the gateway's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from mooncake_core.registry import Role
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


class Setting:
    """A pair of engines behind a gateway, and clients to it."""

    def __init__(self, running: Gateway, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        self.prefill, self.decode = prefill, decode
        base = f"{running.url}/v1"
        self.client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
        self.blocking = openai.OpenAI(base_url=base, api_key="none", max_retries=0)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    prefill = ScriptedEngine("p", Role.PREFILL, "MooncakeConnector", cached_tokens=3)
    decode = ScriptedEngine("d", Role.DECODE, "MooncakeConnector")
    async with (
        engines(prefill, decode),
        gateway(tmp_path, [prefill.instance(), decode.instance()]) as running,
    ):
        made = Setting(running, prefill, decode)
        yield made
        await made.client.close()
        made.blocking.close()


async def test_a_chat(setting: Setting) -> None:
    answer = await setting.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].message.content == " t0 t1 t2"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_streamed_chat_with_usage(setting: Setting) -> None:
    stream = await setting.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == " t0 t1 t2"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3


async def test_a_completion_of_token_ids_from_the_blocking_client(setting: Setting) -> None:
    def ask() -> str:
        return (
            setting.blocking.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=2).choices[0].text
        )

    def stream() -> str:
        answer = setting.blocking.completions.create(model="tiny", prompt=[1, 2], max_tokens=2, stream=True)
        return "".join(chunk.choices[0].text for chunk in answer)

    assert await asyncio.to_thread(ask) == " t0 t1"
    assert await asyncio.to_thread(stream) == " t0 t1"


async def test_the_models_that_are_served(setting: Setting) -> None:
    assert [model.id async for model in setting.client.models.list()] == ["tiny"]


async def test_errors_arrive_as_the_clients_own_exceptions(setting: Setting) -> None:
    create = setting.client.completions.create
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await create(model="tiny", prompt=[-1])
    setting.prefill.usual = Act(status=503, headers={"Retry-After": "3"})
    with pytest.raises(openai.InternalServerError) as busy:
        await create(model="tiny", prompt=[1])
    assert busy.value.response.headers["retry-after"] == "3"
    setting.prefill.usual = Act(status=429)
    with pytest.raises(openai.RateLimitError):
        await create(model="tiny", prompt=[1])


async def test_a_stream_that_breaks_off_raises_instead_of_ending(setting: Setting) -> None:
    setting.decode.script = [Act(die_after=2)]
    stream = await setting.client.completions.create(model="tiny", prompt=[1], max_tokens=9, stream=True)
    seen = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError, match="broke off"):
        await read()
    assert seen == [" t0", " t1"]
