"""The ids of a request's prompt, from wherever they can be had."""

from __future__ import annotations

from mooncake_core.blocks import block_keys

from mooncake_scheduler.gateway.body import Body, Prompt, token_ids
from mooncake_scheduler.gateway.tokens.prefix import Prefix

BYTES_A_TOKEN = 4


class Tokens:
    """Tokens of prompts."""

    def of_ids(self, body: Body, block_size_tokens: int, lora: str | None, salt: str | None) -> Prefix:
        """The prefix of a prompt sent as token ids.

        Raises:
            ErrorAnswer: 400, an element is no token id.
        """
        raw = body.raw("prompt")
        assert raw is not None
        ids = token_ids(raw)
        return Prefix(len(ids), block_keys(ids, block_size_tokens, lora_name=lora, cache_salt=salt))

    async def of_text(
        self, body: Body, form: Prompt | None, block_size_tokens: int, lora: str | None, salt: str | None
    ) -> Prefix:
        """The prefix of a chat, a text, or several prompts."""
        return Prefix(max(1, len(body.data) // BYTES_A_TOKEN))
