"""Strings with a meaning: quantities, ratios, durations, names; their patterns and what they are worth."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated

from pydantic import Field, PlainSerializer, SerializationInfo, StringConstraints

from mooncake_core.api.base import Write

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
RATIO_PATTERN = r"^[0-9]+(\.[0-9]+)?$"
DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|s)$"
PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"

MAX_NAME = 40
"""Longest name of a cluster or pool: what is added to it for Pods and Services stays within DNS' 63."""

BY_VALUE = "by value"
"""Context of a serialization that writes 8Ti and 8192Gi alike: for comparing, not for showing."""


def alike(value_of: Callable[[str], Decimal]) -> PlainSerializer:
    """Serializes what can be written in several ways as one of them, where the context is `BY_VALUE`."""

    def write(text: str, info: SerializationInfo) -> str:
        return str(value_of(text).normalize()) if info.context == BY_VALUE else text

    return PlainSerializer(write, return_type=str)


Quantity = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=32),
    alike(lambda text: quantity(text)),
    Write('a quantity as text, e.g. "64Gi"'),
]
Name = Annotated[
    str,
    StringConstraints(pattern=NAME_PATTERN, max_length=MAX_NAME),
    Write("small letters, digits and '-', beginning with a letter, at most 40 in all, e.g. kimi"),
]
ObjectName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253),
    Write("the name of the object, e.g. redis"),
]
Ratio = Annotated[
    str,
    StringConstraints(pattern=RATIO_PATTERN, max_length=16),
    alike(Decimal),
    Write('a decimal number as text, e.g. "0.25"'),
]
Duration = Annotated[
    str,
    StringConstraints(pattern=DURATION_PATTERN, max_length=16),
    alike(lambda text: _duration(text)),
    Write("seconds or milliseconds, e.g. 2s or 100ms"),
]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024), Write("text of 1 to 1024 characters")]
Argument = Annotated[
    str,
    StringConstraints(min_length=1, max_length=4096),
    Write('one argument, e.g. "--max-model-len=131072"'),
]
AbsolutePath = Annotated[
    str,
    StringConstraints(pattern=r"^/[A-Za-z0-9._/-]*$", max_length=1024),
    Write("an absolute path, e.g. /models/kimi-k2"),
]
Replicas = Annotated[int, Field(ge=1, le=1000), Write("a number of instances, e.g. 2")]
Seconds = Annotated[int, Field(ge=1, le=86_400), Write("whole seconds, e.g. 600")]
DevicesPerInstance = Annotated[int, Field(ge=1, le=1024), Write("a number, e.g. 8")]

_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(.*)$")
_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}


def quantity(text: str) -> Decimal:
    """What a Kubernetes quantity is worth, in its base unit (bytes, cores).

    Raises:
        ValueError: the text is not a quantity.
    """
    match = _QUANTITY.match(text)
    if match is None or match.group(2) not in _FACTORS:
        raise ValueError(f"not a quantity: {text!r}")
    return Decimal(match.group(1)) * _FACTORS[match.group(2)]


def quantity_bytes(text: str) -> int:
    """A quantity of memory or disk in whole bytes, rounded up."""
    return int(quantity(text).to_integral_value(rounding="ROUND_CEILING"))


def duration_s(text: str) -> float:
    """Seconds of a duration such as `2s` or `100ms`.

    Raises:
        ValueError: the text is not such a duration.
    """
    return float(_duration(text))


def _duration(text: str) -> Decimal:
    if not re.match(DURATION_PATTERN, text):
        raise ValueError(f"not a duration: {text!r}")
    if text.endswith("ms"):
        return Decimal(text.removesuffix("ms")) / 1000
    return Decimal(text.removesuffix("s"))
