from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.blocks import block_keys
from mooncake_core.config.base import ConfigError
from mooncake_scheduler.gateway.body import Body, Prompt
from mooncake_scheduler.gateway.errors import ErrorAnswer
from mooncake_scheduler.gateway.tokens import Domain, ModelFolder, TemplateFailedError, Tokens
from mooncake_scheduler.gateway.tokens.conversations import Conversations
from mooncake_testing.toy_model import SPECIALS, write_toy_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder(write_toy_model(tmp_path_factory.mktemp("model")))


def chat(*turns: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]


def tokens_of(folder: ModelFolder, *, trusted: bool = True) -> Tokens:
    return Tokens(folder, lambda: None, lambda: trusted)


def test_a_chat_is_rendered_by_the_folders_template(folder: ModelFolder) -> None:
    text = folder.render(chat("hi <b>"), [{"name": "ü"}])
    assert text == (
        '<|bos|><|im_start|>tools\n[{"name": "ü"}]<|im_end|>\n<|im_start|>user\nhi <b><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_a_chat_that_the_template_refuses_says_why(folder: ModelFolder) -> None:
    with pytest.raises(TemplateFailedError, match="unknown role robot"):
        folder.render([{"role": "robot", "content": ""}], None)


def test_a_template_cannot_reach_the_process(tmp_path: Path) -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TemplateFailedError):
        ModelFolder(write_toy_model(tmp_path, template=evil)).render(chat("x"), None)


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_folder_is_refused_with_the_files_name(tmp_path: Path, broken: str) -> None:
    write_toy_model(tmp_path)
    (tmp_path / broken).write_text("{")
    with pytest.raises(ConfigError, match=broken):
        ModelFolder(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelFolder(tmp_path)


def test_a_template_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    write_toy_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert ModelFolder(tmp_path).render(chat("a", "b"), None) == "2"


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.text(max_size=30) | st.sampled_from(SPECIALS), min_size=1, max_size=7))
def test_conversations_give_the_same_ids_as_the_whole_text_turn_after_turn(
    folder: ModelFolder, turns: list[str]
) -> None:
    cache = Conversations(folder)
    for last in range(1, len(turns) + 1, 2):
        text = folder.render(chat(*turns[:last]), None)
        assert list(cache.encode(text)) == folder.encode(text, add_special_tokens=False)


def test_a_later_turn_tokenises_only_what_is_new(folder: ModelFolder) -> None:
    cache = Conversations(folder)
    assert cache.can_cut
    cache.encode(folder.render(chat("a" * 500), None))
    cache.encode(folder.render(chat("a" * 500, "b", "c"), None))
    assert (cache.hits, cache.misses) == (1, 1)


def test_the_conversations_kept_are_bounded(folder: ModelFolder) -> None:
    cache = Conversations(folder, most_tokens=200)
    for number in range(50):
        cache.encode(folder.render(chat(f"{number} " * 20), None))
    assert sum(len(ids) for ids in cache._kept.values()) <= 200


async def test_a_chat_gets_the_keys_of_its_rendered_text(folder: ModelFolder) -> None:
    messages = chat("the quick brown fox")
    body = Body(json.dumps({"model": "tiny", "messages": messages}).encode())
    prefix = await tokens_of(folder).of_text(body, None, Domain(4, cache_salt="s"))
    ids = folder.encode(folder.render(messages, None), add_special_tokens=False)
    assert prefix.tokens == len(ids)
    assert prefix.keys == block_keys(ids, 4, cache_salt="s")
    assert prefix.ids_json is None


async def test_a_text_goes_on_as_ids(folder: ModelFolder) -> None:
    body = Body(b'{"model":"tiny","prompt":"the quick brown fox"}')
    prefix = await tokens_of(folder).of_text(body, Prompt.TEXT, Domain(4))
    ids = folder.encode("the quick brown fox", add_special_tokens=True)
    assert json.loads(prefix.ids_json or b"") == ids
    assert prefix.keys == block_keys(ids, 4)


async def test_a_text_that_is_to_be_echoed_stays_text(folder: ModelFolder) -> None:
    body = Body(b'{"model":"tiny","prompt":"the quick","echo":true}')
    assert (await tokens_of(folder).of_text(body, Prompt.TEXT, Domain(4))).ids_json is None


async def test_a_chat_that_the_template_refuses_is_the_clients_error(folder: ModelFolder) -> None:
    body = Body(b'{"model":"tiny","messages":[{"role":"robot","content":"x"}]}')
    with pytest.raises(ErrorAnswer) as refused:
        await tokens_of(folder).of_text(body, None, Domain(4))
    assert refused.value.status == 400
    assert "unknown role robot" in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}',
        b'{"messages":[{"role":"user","content":"x"}],"continue_final_message":true}',
        b'{"prompt_embeds":"abc"}',
    ],
)
async def test_what_only_the_engine_can_tokenise_is_placed_by_its_size_when_no_engine_answers(
    folder: ModelFolder, body: bytes
) -> None:
    tokens = tokens_of(folder)
    prefix = await tokens.of_text(Body(body), None, Domain(4))
    assert prefix.tokens == len(body) // 4
    assert not prefix.keys
    assert tokens.estimates == 1


async def test_several_prompts_add_up(folder: ModelFolder) -> None:
    body = Body(b'{"prompt":[[1,2,3,4,5],[6]]}')
    prefix = await tokens_of(folder).of_text(body, Prompt.BATCH, Domain(4))
    assert prefix.tokens == 6
    assert prefix.keys == block_keys([1, 2, 3, 4, 5], 4)


@pytest.mark.parametrize("prompt", [b"[1,-2]", b"[1,4294967296]", b'[1,"a"]', b"[1.5]", b"[true]"])
def test_ids_that_are_none_are_the_clients_error(folder: ModelFolder, prompt: bytes) -> None:
    with pytest.raises(ErrorAnswer) as refused:
        tokens_of(folder).of_ids(Body(b'{"prompt":' + prompt + b"}"), Domain(4))
    assert refused.value.status == 400
    assert refused.value.param == "prompt"
