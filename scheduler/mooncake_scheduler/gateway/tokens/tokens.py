"""The ids of a request's prompt, from wherever they can be had."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import structlog

from mooncake_scheduler.gateway.body import UNREADABLE, Body, Prompt, token_ids
from mooncake_scheduler.gateway.errors import bad_request
from mooncake_scheduler.gateway.http1 import Upstream
from mooncake_scheduler.gateway.tokens.conversations import Conversations
from mooncake_scheduler.gateway.tokens.folder import ModelFolder, TemplateFailedError
from mooncake_scheduler.gateway.tokens.prefix import Domain, Prefix
from mooncake_scheduler.gateway.tokens.remote import tokenize

_log = structlog.get_logger(__name__)

BYTES_A_TOKEN = 4
THREADS = 4
_ENGINES_OWN = frozenset({"chat_template", "documents", "continue_final_message", "mm_processor_kwargs"})
"""Fields of a chat whose meaning is left to the engine."""
_TEXT_PARTS = ("text", "refusal", "thinking")
"""No set: what a client sends as the type of a part may be anything, hashable or not."""
_TEXT_ONLY = frozenset({"echo", "truncate_prompt_tokens", "suffix"})
"""Fields of a completion for which its text has to go on as text."""


class Tokens:
    """Ids and block keys of prompts.

    Args:
        folder: the model's tokenizer and template; None = the engines are asked.
        engine: an engine whose `/tokenize` can be asked now; None = there is none.
        trusted: whether the folder and the engines tokenise alike.
    """

    def __init__(
        self,
        folder: ModelFolder | None,
        engine: Callable[[], Upstream | None],
        trusted: Callable[[], bool],
    ) -> None:
        self.folder = folder
        self.conversations = None if folder is None else Conversations(folder)
        self.estimates = 0
        """Prompts placed by their size alone, because nobody could tokenise them."""
        self._engine = engine
        self._trusted = trusted
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._encoder = msgspec.json.Encoder()

    def of_ids(self, body: Body, domain: Domain) -> Prefix:
        """The prefix of a prompt sent as token ids.

        Raises:
            ErrorAnswer: 400, an element is no token id.
        """
        raw = body.raw("prompt")
        assert raw is not None
        ids = token_ids(raw)
        return Prefix(len(ids), domain.keys(ids))

    async def of_text(self, body: Body, form: Prompt | None, domain: Domain) -> Prefix:
        """The prefix of a chat or a text; an estimate where nobody can tokenise it.

        Raises:
            ErrorAnswer: 400, the model's template refuses the chat.
        """
        if form is Prompt.BATCH:
            return self._of_batch(body, domain)
        if form is None and "messages" not in body.fields:
            return self._estimate(body)
        named = form is not None or _is_text(_decoded(body, "messages", list))
        work: Callable[[], array[int]] | None = None
        if self.folder is not None and self._trusted():
            work = self._chat_work(body) if form is None else self._text_work(body)
        try:
            if work is not None:
                ids = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            else:
                # As a task: the engine's answer is waited for with a timeout, which asks for the task.
                ids = await asyncio.ensure_future(self._ask_engine(body))
        except TemplateFailedError as error:
            raise bad_request(f"messages: {error}", "messages") from None
        except ConnectionError as error:
            _log.warning("a prompt was not tokenised", error=str(error))
            return self._estimate(body)
        if not named:
            return Prefix(len(ids))
        goes_as_ids = form is Prompt.TEXT and not _TEXT_ONLY.intersection(body.fields)
        return Prefix(len(ids), domain.keys(ids), self._encoder.encode(ids.tolist()) if goes_as_ids else None)

    def _chat_work(self, body: Body) -> Callable[[], array[int]] | None:
        if _ENGINES_OWN.intersection(body.fields):
            return None
        folder, conversations = self.folder, self.conversations
        assert folder is not None
        assert conversations is not None
        if not folder.has_template:
            return None
        messages = _decoded(body, "messages", list)
        tools = _decoded(body, "tools", list)
        variables = _decoded(body, "chat_template_kwargs", dict)
        if not all(
            isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages or ()
        ):
            # Parts of a content, and turns without one, are put together by the engine in its own way.
            return None
        begins_answer = "add_generation_prompt" not in body.fields or body.flag("add_generation_prompt")

        def work() -> array[int]:
            text = folder.render(
                messages or [], tools, add_generation_prompt=begins_answer, variables=variables
            )
            return conversations.encode(text)

        return work

    def _text_work(self, body: Body) -> Callable[[], array[int]]:
        folder = self.folder
        assert folder is not None
        text = body.text("prompt") or ""
        special = "add_special_tokens" not in body.fields or body.flag("add_special_tokens")
        return lambda: array("I", folder.encode(text, add_special_tokens=special))

    async def _ask_engine(self, body: Body) -> array[int]:
        engine = self._engine()
        if engine is None:
            raise ConnectionError("no engine offers /tokenize")
        return await tokenize(engine, body.fields)

    def _of_batch(self, body: Body, domain: Domain) -> Prefix:
        """Several prompts run on one engine: their lengths add up, and the first one's cache counts."""
        raw = body.raw("prompt") or b"[]"
        try:
            prompts = msgspec.json.decode(raw, type=list[list[int]])
        except UNREADABLE:
            return self._estimate(body)
        try:
            first = array("I", prompts[0] if prompts else ())
        except OverflowError:
            raise bad_request("prompt: a token id is negative or above 4294967295", "prompt") from None
        return Prefix(sum(map(len, prompts)), domain.keys(first))

    def _estimate(self, body: Body) -> Prefix:
        self.estimates += 1
        return Prefix(max(1, len(body.data) // BYTES_A_TOKEN))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_text(messages: Sequence[Any]) -> bool:
    """Whether ids determine the KV: pictures and sounds are the same placeholders, whatever is in them."""
    return all(
        not isinstance(part, dict) or part.get("type") in _TEXT_PARTS
        for message in messages or ()
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _decoded(body: Body, field: str, kind: type) -> Any:
    raw = body.raw(field)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        raise bad_request(f"{field}: {error}", field) from None
