"""A model folder without a model: a trained tokenizer with special tokens, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- "<|im_start|>tools\\n" + (tools | tojson) + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ["system", "user", "assistant", "tool"] %}
{{- raise_exception("unknown role " + message.role) }}
{%- endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- endif %}"""
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and answers every question briefly",
    "Hello! What is 2 + 2? Weather in Zürich? First question in two lines. system user assistant",
]


def write_toy_model(folder: Path, *, template: str = TEMPLATE) -> Path:
    """Write the files of a model folder that tokenising needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
    )  # fmt: skip
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
