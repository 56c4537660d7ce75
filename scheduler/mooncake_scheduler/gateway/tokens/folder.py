"""A model folder's tokenizer and chat template, as the engines use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mooncake_core.config.base import ConfigError


class TemplateFailedError(Exception):
    """The chat template does not accept a chat; the message is the template's own."""


class ModelFolder:
    """Tokenises text and chats. Everything here may take long and belongs into a thread.

    Args:
        path: folder with `tokenizer.json`, and for chats a template in `chat_template.jinja` or
            `tokenizer_config.json`.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = path / "tokenizer.json"
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{file}: {error}") from error
        config = _read_json(path / "tokenizer_config.json")
        self._specials = {
            name: _token_text(config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }
        source = _template_source(path, config)
        try:
            self._template = None if source is None else _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f"{path}: the chat template: {error}") from error

    @property
    def has_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """A chat as the text that the model sees.

        Args:
            messages: in OpenAI's form.
            tools: in OpenAI's form; None = none.
            add_generation_prompt: end with the beginning of the assistant's turn.
            variables: `chat_template_kwargs` of the request.

        Raises:
            TemplateFailedError: the template refuses the chat.
        """
        if self._template is None:
            raise TemplateFailedError(f"{self._path} has no chat template")
        given: dict[str, Any] = {
            **self._specials, "messages": messages, "tools": tools, "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        try:
            return self._template.render(given | (variables or {}))
        except TemplateError as error:
            raise TemplateFailedError(str(error)) from error
        except Exception as error:  # a template fails in any way that its author did not think of
            raise TemplateFailedError(f"{type(error).__name__}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        # `encode` keeps Python's lock for as long as it works, a second for a long prompt, and with it every
        # other request; the batch calls let go of it.
        encoded = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes for HTML; models were trained without that.
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return found


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {str(each.get("name")): str(each.get("template")) for each in template}
        return named.get("default") or next(iter(named.values()), None)
    return None if template is None else str(template)
