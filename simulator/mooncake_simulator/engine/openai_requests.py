"""OpenAI request bodies, as far as vLLM understands them, to what the engine needs."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from mooncake_simulator.engine.options import EngineOptions
from mooncake_simulator.engine.tokens import ChatError, TextCodec

_MAX_TOKEN = (1 << 32) - 1


class ApiError(Exception):
    """An answer in vLLM's error form."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400 as vLLM words it."""
    return ApiError(400, "BadRequestError", message, param)


def invalid(message: str, param: str | None = None) -> ApiError:
    """A 400 for a body that does not fit vLLM's request models; worded and typed by its FastAPI handler."""
    return ApiError(400, "Bad Request", f"1 validation error:\n  {message}", param)


class Generation(msgspec.Struct, kw_only=True):
    """One generation request, checked and tokenised."""

    id: str
    chat: bool
    model: str
    prompt: list[int]
    prompt_text: str | None
    max_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    min_tokens: int
    ignore_eos: bool
    stop: list[str]
    stop_in_output: bool
    stop_token_ids: frozenset[int]
    return_token_ids: bool
    echo: bool
    seed: int
    salt: str | None
    transfer: dict[str, Any] | None


def decode_body(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ApiError: the body is something else.
    """
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        # vLLM names the byte at which its parser gave up; a client only learns that it is not JSON.
        raise invalid(f"JSON decode error: {error}", "body.0") from error
    if not isinstance(document, dict):
        raise invalid("Input should be a valid dictionary")
    return document


class RequestReader:
    """Reads bodies for one engine."""

    def __init__(self, options: EngineOptions, codec: TextCodec) -> None:
        self._options = options
        self._codec = codec

    def check_model(self, body: Mapping[str, Any]) -> str:
        """The model asked for, or the only one.

        Raises:
            ApiError: 404, no such model is served.
        """
        names = self._options.served_model_names
        model = body.get("model") or names[0]
        if model not in names:
            raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
        return str(model)

    def completion(self, body: Mapping[str, Any], request_id: str | None) -> Generation:
        """`POST /v1/completions`.

        Raises:
            ApiError: the request cannot be served; as vLLM answers it.
        """
        model = self.check_model(body)
        prompt, text = self._completion_prompt(body.get("prompt"), body.get("add_special_tokens", True))
        return self._generation(body, request_id, model, prompt, text, chat=False, default_max_tokens=16)

    def chat(self, body: Mapping[str, Any], request_id: str | None) -> Generation:
        """`POST /v1/chat/completions`.

        Raises:
            ApiError: the request cannot be served; as vLLM answers it.
        """
        model = self.check_model(body)
        prompt, text = self.chat_prompt(body)
        return self._generation(body, request_id, model, prompt, text, chat=True, default_max_tokens=None)

    def chat_prompt(self, body: Mapping[str, Any]) -> tuple[list[int], str]:
        """Messages rendered with the chat template: ids and text.

        Raises:
            ApiError: no messages, or the template refuses them.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise invalid("messages: a non-empty list is required", "messages")
        if not all(isinstance(message, dict) for message in messages):
            raise invalid("messages: every message must be an object", "messages")
        arguments = _mapping(body, "chat_template_kwargs") or {}
        generation = bool(body.get("add_generation_prompt", True))
        try:
            text = self._codec.render_chat(messages, body.get("tools"), generation, arguments)
        except ChatError as error:
            raise bad_request(str(error)) from error
        return self._codec.encode(text, special=bool(body.get("add_special_tokens", False))), text

    def _completion_prompt(self, prompt: Any, special: bool) -> tuple[list[int], str | None]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            if len(prompt) > 1:
                raise bad_request("the simulated engine takes one prompt a request", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return self._codec.encode(prompt, special=special), prompt
        if prompt == []:
            raise bad_request("The decoder prompt cannot be empty")
        if not isinstance(prompt, list):
            raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if set(map(type, prompt)) != {int} or min(prompt) < 0:
            raise invalid("prompt: Input should be a string or a list of token ids", "prompt")
        if max(prompt) > _MAX_TOKEN:
            raise bad_request(f"Token id {max(prompt)} is out of vocabulary", "prompt")
        return prompt, None

    def _generation(
        self,
        body: Mapping[str, Any],
        request_id: str | None,
        model: str,
        prompt: list[int],
        text: str | None,
        *,
        chat: bool,
        default_max_tokens: int | None,
    ) -> Generation:
        max_tokens = self._max_tokens(body, len(prompt), default_max_tokens, chat=chat)
        min_tokens = _integer(body, "min_tokens", 0, 0)
        if min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
            )
        if _integer(body, "n", 1, 1) != 1:
            raise bad_request("the simulated engine generates one choice a request: send n=1", "n")
        stream = bool(body.get("stream"))
        stream_options = _mapping(body, "stream_options") or {}
        if stream_options and not stream:
            raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
        transfer = transfer_params(body)
        name = request_id or _text(body, "request_id") or uuid.uuid4().hex
        return Generation(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            chat=chat,
            model=model,
            prompt=prompt,
            prompt_text=text,
            max_tokens=max_tokens,
            stream=stream,
            include_usage=bool(stream_options.get("include_usage")),
            continuous_usage=bool(stream_options.get("continuous_usage_stats")),
            min_tokens=min_tokens,
            ignore_eos=bool(body.get("ignore_eos")),
            stop=_stop_strings(body.get("stop")),
            stop_in_output=bool(body.get("include_stop_str_in_output")),
            stop_token_ids=_token_ids(body, "stop_token_ids"),
            return_token_ids=bool(body.get("return_token_ids")),
            echo=bool(body.get("echo")) and not chat,
            seed=_integer(body, "seed", 0, None),
            salt=_salt(body.get("cache_salt")),
            transfer=dict(transfer) if transfer else None,
        )

    def _max_tokens(self, body: Mapping[str, Any], prompt: int, default: int | None, *, chat: bool) -> int:
        limit = self._options.max_model_len
        if prompt > limit:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains "
                f"{prompt} input tokens, which exceeds this limit even without any output tokens. Please "
                "reduce the length of the input prompt.",
                "input_tokens",
            )
        if prompt == limit:
            raise bad_request(
                f"The decoder prompt (length {prompt}) plus the number of requested output tokens "
                f"(at least 1) is longer than the maximum model length of {limit}. Make sure that "
                "`max_model_len` is no smaller than the number of text tokens (prompt + requested output "
                "tokens)."
            )
        name = "max_completion_tokens" if chat and body.get("max_completion_tokens") else "max_tokens"
        asked = body.get(name, default)
        if asked is None:
            return limit - prompt
        if type(asked) is not int or asked < 1:
            raise bad_request(f"{name} must be at least 1, got {asked}.", name)
        if asked > limit:
            raise bad_request(
                f"{name}={asked} cannot be greater than max_model_len={limit}. "
                "Please request fewer output tokens.",
                name,
            )
        return min(asked, limit - prompt)


def transfer_params(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a body says of the hand-over of KV.

    Raises:
        ApiError: it is no object.
    """
    return _mapping(body, "kv_transfer_params")


def _mapping(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{name}: Input should be a valid dictionary", name)
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{name}: Input should be a valid string", name)
    return value


def _token_ids(body: Mapping[str, Any], name: str) -> frozenset[int]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise invalid(f"{name}: Input should be a list of token ids", name)
    return frozenset(value)


def _integer(body: Mapping[str, Any], name: str, default: int, least: int | None) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or (least is not None and value < least):
        raise bad_request(
            f"{name} must be an integer{f' of at least {least}' if least is not None else ''}", name
        )
    return value


def _stop_strings(stop: Any) -> list[str]:
    if stop is None:
        return []
    values = [stop] if isinstance(stop, str) else stop
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise bad_request("stop must be a string or a list of strings, none of them empty", "stop")
    return values


def _salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or any(char in "@/\\\0" for char in salt):
        raise invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain "
            "'@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
    return salt
