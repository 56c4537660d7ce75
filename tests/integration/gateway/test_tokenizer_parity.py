from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncake_core.registry import Role
from mooncake_scheduler.gateway.tokens import ModelFolder, TemplateFailedError
from mooncake_testing.gateway import gateway
from mooncake_testing.scripted_engine import ScriptedEngine, engines
from mooncake_testing.toy_model import write_toy_model
from mooncake_testing.waiting import until

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the quick"}],
    "max_tokens": 2,
}


def like(folder: ModelFolder) -> Any:
    """An engine's /tokenize that agrees with the folder."""

    def tokenize(body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return folder.encode(body["prompt"], add_special_tokens=True)
        try:
            text = folder.render(body["messages"], body.get("tools"))
        except TemplateFailedError:
            return []
        return folder.encode(text, add_special_tokens=False)

    return tokenize


async def test_an_engine_that_tokenises_alike_is_not_asked_for_each_request(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "model")
    engine = ScriptedEngine("e")
    engine.tokenize = like(ModelFolder(model))
    async with engines(engine), gateway(tmp_path, [engine.instance()], model_path=str(model)) as running:
        member = running.scheduler.services.roster.members["e"]
        await until(lambda: member.tokenizer_compared is not None)
        compared = sum(seen.path == "/tokenize" for seen in engine.seen)
        assert compared == 3
        answer = await running.client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert sum(seen.path == "/tokenize" for seen in engine.seen) == compared
        assert member.tokenizer_mismatch == ""


async def test_an_engine_that_tokenises_otherwise_is_asked_and_reported(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "model")
    engine = ScriptedEngine("e", Role.BOTH)
    engine.tokenize = lambda _: list(range(48))
    async with engines(engine), gateway(tmp_path, [engine.instance()], model_path=str(model)) as running:
        member = running.scheduler.services.roster.members["e"]
        await until(lambda: member.tokenizer_mismatch != "")
        await running.client.post("/v1/chat/completions", json=CHAT)
        latest = running.scheduler.services.decisions.latest(1)[0]
        assert latest.ask is not None
        assert latest.ask.prompt_tokens == 48
        text = running.scheduler.metrics_text().decode()
        assert 'mooncake_tokenizer_mismatch{instance="e"} 1.0' in text


async def test_an_instance_is_compared_again_in_its_next_life(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "model")
    engine = ScriptedEngine("e")
    engine.tokenize = lambda _: [1]
    async with engines(engine), gateway(tmp_path, [engine.instance()], model_path=str(model)) as running:
        member = running.scheduler.services.roster.members["e"]
        await until(lambda: member.tokenizer_mismatch != "")
        engine.tokenize = like(ModelFolder(model))
        running.scheduler.services.roster.saw_health(member, healthy=False)
        await until(lambda: member.tokenizer_mismatch == "" and member.reachable)


async def test_without_a_model_folder_the_engine_is_asked(tmp_path: Path) -> None:
    engine = ScriptedEngine("e")
    engine.tokenize = lambda body: list(range(33)) if "messages" in body else [5, 6, 7]
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        await running.client.post("/v1/chat/completions", json=CHAT)
        await running.complete(prompt="a text")
        chat, text = (d.ask for d in reversed(running.scheduler.services.decisions.latest(2)))
        assert chat is not None
        assert text is not None
        assert (chat.prompt_tokens, text.prompt_tokens) == (33, 3)
        assert engine.legs[-1].body["prompt"] == [5, 6, 7]
