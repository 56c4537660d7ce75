"""Sizes as Mooncake's configuration writes them: plain bytes, or `80GB`, `512 mb`, `2GiB`."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


class SizeError(ValueError):
    """Text that is no size."""


def parse_size(text: str | int) -> int:
    """Bytes of a size.

    Raises:
        SizeError: it has another form.
    """
    if isinstance(text, int):
        return text
    match = _FORM.fullmatch(text)
    if match is None:
        raise SizeError(f"{text!r} is not a size: write bytes, or a number with KB, MB, GB or TB")
    return int(float(match[1]) * _UNITS[match[2].lower()])
