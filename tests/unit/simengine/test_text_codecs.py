import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mooncake_simulator.engine.tokens import ByteCodec, ChatError, codec_for

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 20, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("text", ["the cat", "Grüße, 世界", "", "\n\t"])
def test_text_survives_its_way_to_ids_and_back(folder: Path, text: str) -> None:
    for codec in (ByteCodec(), codec_for(str(folder))):
        assert codec.decode(codec.encode(text)) == text


def test_a_text_has_the_ids_that_its_tokenizer_gives_it_with_and_without_special_tokens(folder: Path) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    codec = codec_for(str(folder))
    for special in (True, False):
        for text in ("the cat</s> sat", "Grüße, 世界"):
            assert codec.encode(text, special=special) == plain.encode(text, add_special_tokens=special).ids


def test_a_stream_of_tokens_gives_the_whole_text_also_where_a_letter_takes_several_tokens(
    folder: Path,
) -> None:
    codec = codec_for(str(folder))
    text = "the 世界 cat"
    detokenize = codec.stream()
    assert "".join(detokenize(token) for token in codec.encode(text)) == text


def test_the_models_own_template_end_token_and_words_are_used(folder: Path) -> None:
    codec = codec_for(str(folder))
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    rendered = codec.render_chat(messages, [{"name": "f"}], True, {})
    assert rendered == '<s>[user]hi[{"name": "f"}][assistant]'
    assert codec.eos_token == 1
    assert not {0, 1} & set(codec.output_vocabulary)


def test_what_the_template_refuses_is_an_error_with_its_words(folder: Path) -> None:
    with pytest.raises(ChatError, match="no such role"):
        codec_for(str(folder)).render_chat([{"role": "nobody", "content": ""}], None, True, {})


def test_synthetic_ids_beyond_the_bytes_have_a_printable_stand_in() -> None:
    assert ByteCodec().decode([300, 100_000]).isprintable()
