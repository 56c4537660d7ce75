"""Text to token ids and back: the model folder's own tokenizer, or bytes where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Detokenize = Callable[[int], str]
"""Takes the next token of a stream, gives the text that is complete with it (may be empty)."""


class ChatError(Exception):
    """Messages that the chat template cannot render."""


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    eos_token: int | None
    output_vocabulary: Sequence[int]
    """Ids that the simulated model generates."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def token_text(self, token: int) -> str: ...
    def stream(self) -> Detokenize: ...
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, Any],
    ) -> str: ...


_BYTE_OFFSET = 3
_PLAIN_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class ByteCodec:
    """UTF-8 bytes as tokens: id = byte + 3; 0, 1 and 2 are padding, beginning and end.

    Ids beyond the bytes (prompts made of synthetic ids) decode to a printable stand-in.
    """

    eos_token: int | None = 2

    def __init__(self) -> None:
        self.output_vocabulary: Sequence[int] = [
            byte + _BYTE_OFFSET for byte in range(ord(" "), ord("~") + 1)
        ]
        self._template = _compile(_PLAIN_TEMPLATE)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [byte + _BYTE_OFFSET for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        parts = bytearray()
        for token in tokens:
            parts += self._bytes(token)
        return parts.decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")

    def stream(self) -> Detokenize:
        return self.token_text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, Any],
    ) -> str:
        return _render(self._template, messages, tools, add_generation_prompt, template_arguments, {})

    @staticmethod
    def _bytes(token: int) -> bytes:
        if token < _BYTE_OFFSET:
            return b""
        if token < 256 + _BYTE_OFFSET:
            return bytes((token - _BYTE_OFFSET,))
        return bytes((ord("!") + token % 94,))


class FolderCodec:
    """The tokenizer and chat template of a model folder, as Hugging Face lays it out."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text()) if config_path.is_file() else {}
        template_path = folder / "chat_template.jinja"
        template = template_path.read_text() if template_path.is_file() else config.get("chat_template")
        self._template = _compile(template) if isinstance(template, str) else None
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := config.get(name)) is not None
        }
        eos = self._special.get("eos_token")
        self.eos_token = self._tokenizer.token_to_id(eos) if eos else None
        added = self._tokenizer.get_added_tokens_decoder()
        self.output_vocabulary: Sequence[int] = sorted(
            token for token in self._tokenizer.get_vocab().values() if token not in added
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # Places in the text are not asked for, and Python's lock is let go of, unlike by `encode`.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def stream(self) -> Detokenize:
        decoder = DecodeStream(skip_special_tokens=True)
        return lambda token: decoder.step(self._tokenizer, token) or ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, Any],
    ) -> str:
        if self._template is None:
            raise ChatError(
                "As of transformers v4.44, default chat template is no longer allowed, so you must "
                "provide a chat template if the tokenizer does not define one."
            )
        return _render(
            self._template, messages, tools, add_generation_prompt, template_arguments, self._special
        )


def codec_for(model: str) -> TextCodec:
    """The tokenizer of a model folder; bytes when `model` is only a name."""
    folder = Path(model)
    return FolderCodec(folder) if (folder / "tokenizer.json").is_file() else ByteCodec()


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise ChatError(message)


def _render(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    template_arguments: Mapping[str, Any],
    special: Mapping[str, str],
) -> str:
    try:
        return template.render(
            {
                **special,
                **template_arguments,
                "messages": [_with_plain_content(message) for message in messages],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
        # A template does with what is in a message whatever it likes.
        raise ChatError(str(error)) from error


def _with_plain_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text", "") if isinstance(part, dict) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ChatError("every part of a message's content must be a text")
    return {**message, "content": "\n".join(texts)}
