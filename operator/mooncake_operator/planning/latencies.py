"""What schedulers have measured lately against what the SLO asks for.

Each scheduler says of the last minute and of the last five: how many requests were judged, how many kept
their own target, and a sketch of the values. Counts and sketches add up over schedulers, so that busier ones
weigh more. All times are model seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_core.api.slo import SloSpec, SloTarget
from mooncake_core.sketch import Sketch
from mooncake_operator.planning import reasons
from mooncake_operator.planning.verdicts import Verdict

SHORT, LONG = "60", "300"
"""Windows, in wall seconds, as schedulers name them."""
ENOUGH = 20
"""Requests that a share must be of to say something about percentiles."""
_NAMES = {"ttft": "TTFT", "tbt": "TBT"}
_USUAL = SloTarget(percentile=90, multiplier="10")
"""What is shown without an SLO."""


@dataclass(slots=True)
class _Window:
    judged: int = 0
    kept: int = 0
    sketch: Sketch = field(default_factory=Sketch)

    def add(self, document: Mapping[str, Any]) -> None:
        sketch = Sketch.from_wire(document["sketch"])
        judged, kept = int(document["judged"]), int(document["kept"])
        self.judged += judged
        self.kept += kept
        self.sketch.merge(sketch)

    def keeps(self, target: SloTarget) -> bool:
        """Percentile P is within the target just when at least P % of the requests are."""
        return self.kept * 100 >= self.judged * target.percentile


class Latencies:
    """The sum of what all schedulers of a cluster have measured lately."""

    def __init__(self, stats: Iterable[Mapping[str, Any]]) -> None:
        """Add up documents of `GET /stats`; those that cannot be read, as of other versions, are left out."""
        self._windows = {(name, window): _Window() for name in _NAMES for window in (SHORT, LONG)}
        self.schedulers = 0
        """Those that could be read."""
        for document in stats:
            try:
                read = _read(document)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            self.schedulers += 1
            for key, window in self._windows.items():
                window.add(read[key])

    def shown(self, slo: SloSpec) -> dict[str, str | None]:
        """Fields `ttft` and `tbt` of a cluster's status, at the SLO's percentile; None = nothing measured."""
        return {name: self._shown(name, getattr(slo, name) or _USUAL) for name in _NAMES}

    def verdict(self, slo: SloSpec, before: str | None) -> Verdict | None:
        """`SLOMet`; None where there is no SLO.

        A turn needs both windows: the long one, so that no single request turns it, and the short one, so
        that what is over is not held against the cluster. Between the two it stays as it was.

        Args:
            slo: targets.
            before: the condition's status so far; None = there was none.
        """
        targets = {name: target for name in _NAMES if (target := getattr(slo, name)) is not None}
        if not targets:
            return None
        if not self.schedulers:
            return _unknown(reasons.STATISTICS_UNKNOWN, "no scheduler tells what it has measured")
        judged = min(self._windows[name, LONG].judged for name in targets)
        if not judged:
            return _unknown(reasons.NO_TRAFFIC, "nothing was measured in the last 5 minutes")
        # Once it is known, a little less will do: or it would come and go with every other request.
        enough = ENOUGH if before in (None, "Unknown") else ENOUGH // 2
        if judged < enough:
            return _unknown(
                reasons.TOO_FEW_REQUESTS,
                f"fewer than {ENOUGH} streamed requests were measured in the last 5 minutes",
            )
        return self._judged(targets, before)

    def _judged(self, targets: Mapping[str, SloTarget], before: str | None) -> Verdict:
        long = {name: self._windows[name, LONG].keeps(target) for name, target in targets.items()}
        short = {name: self._windows[name, SHORT].keeps(target) for name, target in targets.items()}
        holds = all(long.values())
        if before == str(not holds) and all(short.values()) is not holds:
            holds = not holds
        words = "; ".join(self._words(name, target) for name, target in targets.items())
        if holds:
            return Verdict("SLOMet", True, reasons.SLO_MET, words)
        return Verdict("SLOMet", False, reasons.SLO_MISSED, words)

    def _words(self, name: str, target: SloTarget) -> str:
        window = self._windows[name, LONG]
        limit = target.target or f"{target.multiplier} times that of an idle request"
        share = 100 * window.kept // window.judged
        return f"{share} % of requests keep {_NAMES[name]} {limit} (wanted: {target.percentile} %)"

    def _shown(self, name: str, target: SloTarget) -> str | None:
        sketch = self._windows[name, LONG].sketch
        return duration(sketch.percentile(target.percentile / 100)) if len(sketch) else None


def duration(seconds: float) -> str:
    """Seconds in two digits, as people read them: 12s, 1.2s, 85ms, 0.4ms."""
    if seconds >= 0.9995:
        return f"{float(f'{seconds:.2g}'):g}s"
    return f"{float(f'{seconds * 1000:.2g}'):g}ms"


def _read(document: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    recent = document["recent"]
    read = {(name, window): recent[window][name] for name in _NAMES for window in (SHORT, LONG)}
    for found in read.values():
        _Window().add(found)
    return read


def _unknown(reason: str, message: str) -> Verdict:
    return Verdict("SLOMet", None, reason, message)
