"""What became of one request, from what came back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

import msgspec

from mooncake_core.slo import worst_gaps_mean
from mooncakectl.replay.exchange import Answer, Ending

_FINISHED: Final = frozenset({"length", "stop"})


class OutcomeKind(StrEnum):
    """The four ways a request can end for its user, and one for the operator's Ctrl-C."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """429: the server said beforehand that it would not keep its promise."""
    FAILED = "failed"
    """An explicit error."""
    LOST = "lost"
    """No answer, or one that stops without saying why. This must not happen."""
    INTERRUPTED = "interrupted"
    """Under way when the replay was stopped; says nothing of the server."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request's end. Durations are wall seconds."""

    index: int
    """Place in the trace that was replayed."""
    kind: OutcomeKind
    reason: str = ""
    """Why it did not complete: the error's code, the HTTP status, or how the connection ended."""
    started_s: float = 0.0
    ended_s: float = 0.0
    ttft_s: float | None = None
    tbt_s: float | None = None
    """Mean of the longest 10 % of the gaps between tokens (FAST'25 §5.1); None with fewer than two tokens."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """None when the server does not report it."""
    completion_tokens: int = 0


def classify(index: int, answer: Answer) -> Outcome:
    """Judge an answer."""

    def ended(kind: OutcomeKind, reason: str) -> Outcome:
        return Outcome(
            index=index, kind=kind, reason=reason, started_s=answer.started_s, ended_s=answer.ended_s
        )

    if answer.status is None or answer.ending is Ending.NOT_HTTP:
        return ended(OutcomeKind.LOST, _lost_reason(answer))
    if answer.status == 429:
        return ended(OutcomeKind.REFUSED, _error_code(answer.body) or "429")
    if answer.status != 200:
        code = _error_code(answer.body)
        return ended(OutcomeKind.FAILED, f"{answer.status} {code}" if code else str(answer.status))

    last, before = _parsed(answer.last_events[1]), _parsed(answer.last_events[0])
    if "error" in last:
        return ended(OutcomeKind.FAILED, f"stream {_code_of(last['error']) or 'error'}")
    # The last event carries the usage and no choice; the one before it the end of the text.
    usage_apart = last.get("choices") == []
    finish = _finish_reason(before if usage_apart else last)
    if not answer.done or finish is None:
        return ended(OutcomeKind.LOST, _lost_reason(answer))
    if finish not in _FINISHED:
        return ended(OutcomeKind.FAILED, f"finish {finish}")
    usage = last.get("usage")
    times_s = answer.event_times_s[:-1] if usage_apart else answer.event_times_s
    return _completed(index, answer, times_s, usage if isinstance(usage, dict) else {})


def _completed(index: int, answer: Answer, times_s: Sequence[float], usage: dict[str, Any]) -> Outcome:
    details = usage.get("prompt_tokens_details")
    return Outcome(
        index=index,
        kind=OutcomeKind.COMPLETED,
        started_s=answer.started_s,
        ended_s=answer.ended_s,
        ttft_s=times_s[0] - answer.started_s if times_s else None,
        tbt_s=tail_tbt_s(times_s),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        completion_tokens=_count(usage.get("completion_tokens")),
    )


def tail_tbt_s(times_s: Sequence[float]) -> float | None:
    """A request's TBT from the times of its tokens; None with fewer than two."""
    return worst_gaps_mean(b - a for a, b in pairwise(times_s))


def _lost_reason(answer: Answer) -> str:
    if answer.ending is Ending.COMPLETE:
        return "ended_without_finish"
    if answer.ending is Ending.CUT and answer.status is None:
        return "no_answer"
    return answer.ending.value


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(event.removeprefix(b"data:").strip())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _finish_reason(event: dict[str, Any]) -> str | None:
    choices = event.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
        return reason if isinstance(reason, str) else None
    return None


def _error_code(body: bytes) -> str:
    return _code_of(_parsed(body).get("error"))


def _code_of(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "")
    return ""


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
