"""Replay of a trace against any OpenAI-compatible server, and what its users would have seen."""

from mooncakectl.replay.driver import Progress, ReplayOptions, replay
from mooncakectl.replay.outcome import Outcome, OutcomeKind
from mooncakectl.replay.result import ReplayResult
from mooncakectl.replay.target import TargetError

__all__ = [
    "Outcome",
    "OutcomeKind",
    "Progress",
    "ReplayOptions",
    "ReplayResult",
    "TargetError",
    "replay",
]
