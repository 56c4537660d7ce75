"""When a new measurement is worth a write: numbers move all the time, statuses must not.

The last measurement stands in the status with its time, so that this holds over restarts of the operator. A
new one replaces it when it reads differently and the last one has stood for a while, or its condition turns.
So an idle cluster writes nothing, a busy one at a bounded rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_operator.planning.reading import seconds
from mooncake_operator.planning.statuses import timestamp
from mooncake_operator.planning.verdicts import Verdict

MEASURED_TIME = "measuredTime"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Fields of a status that were measured, and the condition that rests on them."""

    fields: Mapping[str, Any]
    verdict: Verdict | None = None


def settled_measurement(
    status: Mapping[str, Any],
    condition: str,
    names: tuple[str, ...],
    measure: Callable[[str | None], Measurement] | None,
    *,
    now_s: float,
    every_s: float,
    same: Callable[[Mapping[str, Any]], Any] = lambda fields: fields,
) -> tuple[dict[str, Any], Verdict | None]:
    """What a status shall say: the last measurement or a new one; and its condition.

    Args:
        status: the live object's.
        condition: type of the condition that rests on the measurement.
        names: the fields that are measured.
        measure: gives the new measurement, from the condition's present status; None = there is none now.
        now_s: Unix seconds.
        every_s: how long a measurement stands at least.
        same: what of the fields tells two measurements apart.
    """
    old_verdict = _verdict(status, condition)
    old = {name: status[name] for name in names if status.get(name) is not None}
    if measure is None:
        return _with_time(old, status.get(MEASURED_TIME)), old_verdict
    made = measure(_status_word(old_verdict))
    new = {name: value for name, value in made.fields.items() if value is not None}
    unchanged = same(new) == same(old) and made.verdict == old_verdict
    measured_s = seconds(status.get(MEASURED_TIME))
    # That a condition turns is never held back: what turns it has to see to it that it does so seldom.
    turned = _status_word(made.verdict) != _status_word(old_verdict)
    stands = measured_s and measured_s <= now_s < measured_s + every_s and not _is_unknown(old_verdict)
    if unchanged or (stands and not turned):
        return _with_time(old, status.get(MEASURED_TIME)), old_verdict or made.verdict
    return _with_time(new, timestamp(now_s)), made.verdict


def _with_time(fields: dict[str, Any], stamp: str | None) -> dict[str, Any]:
    return fields | {MEASURED_TIME: stamp} if stamp else fields


def _verdict(status: Mapping[str, Any], condition: str) -> Verdict | None:
    for found in status.get("conditions") or ():
        if found["type"] == condition:
            holds = {"True": True, "False": False}.get(found["status"])
            return Verdict(condition, holds, found["reason"], found.get("message", ""))
    return None


def _is_unknown(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.holds is None


def _status_word(verdict: Verdict | None) -> str | None:
    if verdict is None:
        return None
    return "Unknown" if verdict.holds is None else str(verdict.holds)
