"""Request bodies, read and rewritten without touching the prompt's bytes.

A body is split into its top-level fields, each a slice of the original buffer. Whatever is not looked at
goes on byte for byte; a rewritten body is those slices joined again with some dropped and some put in. Of a
field sent twice the last one counts, as with engines, and only that one goes on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from enum import Enum
from math import inf
from typing import Final

import msgspec

from mooncake_scheduler.gateway.errors import bad_request

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IDS = msgspec.json.Decoder(list[int])
_STRING = msgspec.json.Decoder(str)
_NESTED: Final = re.compile(rb"\s*\[\s*([\[\"]|$)")

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding JSON of others may raise; the last for what is nested too deeply."""
_MOST: Final = (1 << 63) - 1
"""A larger number is none that an engine could count with, nor are its floats."""
_NAMES: dict[str, bytes] = {}
"""Encoded field names; clients use few short ones, so the table stays small."""
_NAMES_KEPT: Final = 256
_LONGEST_NAME: Final = 64


class Prompt(Enum):
    """Form of a completion's prompt."""

    IDS = "ids"
    TEXT = "text"
    BATCH = "batch"
    """Several prompts in one request."""


def _name(field: str) -> bytes:
    encoded = _NAMES.get(field)
    if encoded is None:
        encoded = msgspec.json.encode(field) + b":"
        if len(_NAMES) < _NAMES_KEPT and len(field) <= _LONGEST_NAME:
            _NAMES[field] = encoded
    return encoded


class Body:
    """A parsed request body.

    Args:
        data: the body's bytes.

    Raises:
        ErrorAnswer: 400, it is no JSON object.
    """

    __slots__ = ("data", "fields")

    def __init__(self, data: bytes) -> None:
        self.data = data
        try:
            self.fields: Mapping[str, msgspec.Raw] = _FIELDS.decode(data)
            if not data.isascii():
                # Values that are not looked at are not decoded, and JSON is UTF-8.
                data.decode()
        except UNREADABLE as error:
            raise bad_request(f"the body is not a JSON object: {error}") from None

    def raw(self, field: str) -> bytes | None:
        """A field's JSON; None when it is absent or null."""
        found = self.fields.get(field)
        if found is None:
            return None
        value = bytes(found)
        return value if value != b"null" else None

    def text(self, field: str) -> str | None:
        """A string field.

        Raises:
            ErrorAnswer: 400, it is something else.
        """
        value = self.raw(field)
        if value is None:
            return None
        try:
            return _STRING.decode(value)
        except UNREADABLE:
            raise bad_request(f"{field}: a string is expected", field) from None

    def integer(self, field: str) -> int | None:
        """A whole number; engines take `10.0` for 10, and so do we.

        Raises:
            ErrorAnswer: 400, it is something else.
        """
        value = self.raw(field)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            number = self._whole_float(value, field)
        if not -_MOST <= number <= _MOST:
            raise bad_request(f"{field}: {_MOST} is the most", field)
        return number

    @staticmethod
    def _whole_float(value: bytes, field: str) -> int:
        try:
            number = float(value)
        except ValueError:
            number = inf
        if not number.is_integer():
            raise bad_request(f"{field}: a whole number is expected", field)
        return int(number)

    def flag(self, field: str) -> bool:
        """A boolean; absent and null count as false.

        Raises:
            ErrorAnswer: 400, it is something else.
        """
        value = self.raw(field)
        if value is None or value == b"false":
            return False
        if value == b"true":
            return True
        raise bad_request(f"{field}: true or false is expected", field)

    def rewritten(self, drop: frozenset[str], put: Mapping[str, bytes]) -> bytes:
        """The body with fields left out and others set, all else byte for byte."""
        parts: list[bytes | msgspec.Raw] = []
        for field, value in self.fields.items():
            if field not in drop and field not in put:
                parts += (b",", _name(field), value)
        for field, encoded in put.items():
            parts += (b",", _name(field), encoded)
        if not parts:
            return b"{}"
        parts[0] = b"{"
        parts.append(b"}")
        return b"".join(parts)

    def extended(self, put: Mapping[str, bytes]) -> bytes:
        """The body with fields set; cheap when the client sent none of them."""
        if not put:
            return self.data
        if any(field in self.fields for field in put) or not self.fields:
            return self.rewritten(frozenset(), put)
        data = self.data
        extra = b",".join([_name(field) + encoded for field, encoded in put.items()])
        return b"%b,%b}" % (data[: data.rindex(b"}")], extra)


def prompt_form(raw: bytes) -> Prompt:
    """What a prompt is: token ids, one text, or several of either."""
    if raw[:1] == b'"':
        return Prompt.TEXT
    if _NESTED.match(raw, 0):
        return Prompt.BATCH
    return Prompt.IDS


def token_ids(raw: bytes) -> array[int]:
    """The ids of a prompt sent as such, u32 each.

    Raises:
        ErrorAnswer: 400, an element is no token id.
    """
    try:
        return array("I", _IDS.decode(raw))
    except UNREADABLE as error:
        raise bad_request(f"prompt: {error}", "prompt") from None
    except OverflowError:
        raise bad_request("prompt: a token id is negative or above 4294967295", "prompt") from None
