"""The times of a trace as they are typed: how fast it is played, how far arrivals are spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mooncake_simulator.workloads import Request

_DAY_S: Final = 86_400.0
_LONGEST_S: Final = 366 * _DAY_S


def check_speed(speed: float) -> None:
    """A speed that time passes at.

    Raises:
        ValueError: it is none.
    """
    if not 0 < speed < float("inf"):
        raise ValueError(f"--speed {speed:g}: write a number above 0, e.g. 1.5")


def check_jitter(jitter_ms: float) -> None:
    """A width that arrivals can be spread over.

    Raises:
        ValueError: it is none.
    """
    if not 0 <= jitter_ms < float("inf"):
        raise ValueError(f"--jitter-ms {jitter_ms:g}: write a number of milliseconds, e.g. 3000")


def check_span(trace: Path, requests: Sequence[Request], speed: float, jitter_ms: float) -> None:
    """A time that loads can be kept of.

    Raises:
        ValueError: it is longer than a year; one wrong time stamp is enough.
    """
    times_ms = [request.timestamp_ms for request in requests]
    span_s = (max(times_ms) - min(times_ms) + jitter_ms) / 1e3 / speed
    if span_s > _LONGEST_S:
        raise ValueError(
            f"{trace}: arrivals over {span_s / _DAY_S:,.3g} days, a year is the most: are all time stamps "
            "milliseconds since one moment? else a larger --speed or a --limit"
        )
