"""Distributions that can be written on a command line: `lognormal:60s:1.0`, `exp:30s`, `const:10s`."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"(?P<value>[0-9]*\.?[0-9]+(?:e-?[0-9]+)?)(?P<unit>ms|s|m|h|k)?")
_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "k": 1000.0}


class Distribution(NamedTuple):
    """Where lengths, gaps and counts come from."""

    text: str
    """As it was written."""
    draw: Callable[[random.Random], float]
    """One value, never negative."""

    def __str__(self) -> str:
        return self.text


def parse_distribution(text: str) -> Distribution:
    """Read a distribution.

    One of `const:X` (or just `X`), `uniform:LOW:HIGH`, `exp:MEAN`, `lognormal:MEDIAN:SIGMA`,
    `geometric:MEAN` (whole numbers from 1), `quantiles:P0:P50:P90:P99:P100` (straight lines between). Times
    take ms, s, m or h (default s), tokens k for thousands.

    Raises:
        ValueError: it is not one of these.
    """
    kind, _, rest = text.strip().partition(":")
    words = rest.split(":") if rest else []
    if not words and _NUMBER.fullmatch(kind):
        kind, words = "const", [kind]
    known = _KINDS.get(kind)
    if known is None:
        raise ValueError(f"distribution {text!r}: expected a number or one of {', '.join(_FORMS)}")
    form, count, build = known
    if len(words) != count:
        raise ValueError(f"distribution {text!r}: expected {form}")
    try:
        return Distribution(text.strip(), build([parse_quantity(word) for word in words]))
    except ValueError as error:
        raise ValueError(f"distribution {text!r}: {error}") from None


def parse_quantity(text: str) -> float:
    """A number with a unit: seconds from ms, s, m or h, thousands from k.

    Raises:
        ValueError: it is not one.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number, alone or with ms, s, m, h or k behind it")
    return float(match["value"]) * _UNITS[match["unit"] or ""]


_Draw = Callable[[random.Random], float]


def _const(values: Sequence[float]) -> _Draw:
    (value,) = values
    return lambda chance: value


def _uniform(values: Sequence[float]) -> _Draw:
    low, high = values
    if low > high:
        raise ValueError(f"{low:g} is above {high:g}")
    return lambda chance: chance.uniform(low, high)


def _exponential(values: Sequence[float]) -> _Draw:
    (mean,) = values
    if not mean:
        raise ValueError("a mean of 0: write const:0")
    return lambda chance: chance.expovariate(1 / mean)


def _lognormal(values: Sequence[float]) -> _Draw:
    median, sigma = values
    if not median:
        raise ValueError("a median of 0: write const:0")
    mu = math.log(median)
    return lambda chance: chance.lognormvariate(mu, sigma)


def _geometric(values: Sequence[float]) -> _Draw:
    (mean,) = values
    if mean < 1:
        raise ValueError(f"a mean of {mean:g}: whole numbers from 1 have at least 1")
    if mean == 1:
        return lambda chance: 1.0
    scale = math.log(1 - 1 / mean)
    return lambda chance: 1.0 + math.floor(math.log(1.0 - chance.random()) / scale)


def _quantiles(values: Sequence[float]) -> _Draw:
    if list(values) != sorted(values):
        raise ValueError("quantiles must not fall")
    shares = (0.0, 0.5, 0.9, 0.99, 1.0)

    def draw(chance: random.Random) -> float:
        share = chance.random()
        place = next(n for n in range(1, len(shares)) if share < shares[n] or n == len(shares) - 1)
        within = (share - shares[place - 1]) / (shares[place] - shares[place - 1])
        return values[place - 1] + within * (values[place] - values[place - 1])

    return draw


_KINDS: Final[dict[str, tuple[str, int, Callable[[Sequence[float]], _Draw]]]] = {
    "const": ("const:X", 1, _const),
    "uniform": ("uniform:LOW:HIGH", 2, _uniform),
    "exp": ("exp:MEAN", 1, _exponential),
    "lognormal": ("lognormal:MEDIAN:SIGMA", 2, _lognormal),
    "geometric": ("geometric:MEAN", 1, _geometric),
    "quantiles": ("quantiles:P0:P50:P90:P99:P100", 5, _quantiles),
}
_FORMS: Final = [form for form, _, _ in _KINDS.values()]
