"""From values to places on a plot, and where its ticks stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a plot.

    Args:
        low: value at its beginning; above 0 where `log`.
        high: value at its end, above `low`.
        begin: place of `low`, in pixels.
        end: place of `high`.
        label: what is measured, with its unit.
        shown: how a tick's value is written.
        log: whether equal steps are equal factors.
        whole: whether only whole numbers make sense.
    """

    low: float
    high: float
    begin: float
    end: float
    label: str
    shown: Callable[[float], str]
    log: bool = False
    whole: bool = False

    def place(self, value: float) -> float:
        """In pixels; what lies outside stands at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values between the ends, few enough to be read."""
        if self.log:
            return _decades(self.low, self.high)
        return _steps(self.low, self.high, 1.0 if self.whole else 0.0)


def _steps(low: float, high: float, least: float, most: int = 6) -> list[float]:
    rough = max((high - low) / most, least)
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [each * step for each in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = floor(log10(low)), ceil(log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1, 3) if last - first <= 4 else (1,)
    found = [10.0**decade * factor for decade in range(first, last + 1) for factor in factors]
    return [each for each in found if low * (1 - 1e-9) <= each <= high * (1 + 1e-9)]


def percent(value: float) -> str:
    """A share, as ticks show it."""
    return f"{value * 100:.10g} %"


def plain(value: float) -> str:
    """A number, as ticks show it."""
    return f"{value:,.6g}"


def seconds(value_s: float) -> str:
    """A time, as ticks show it."""
    return f"{value_s * 1e3:.6g} ms" if abs(value_s) < 1 else f"{value_s:.6g} s"


def wide_log(values: list[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis that shows all values above 0."""
    above = [value for value in values if value > 0]
    if not above:
        return 0.1, 10.0
    low, high = min(above), max(above)
    return low / 1.1, max(high * 1.1, low * 10)
