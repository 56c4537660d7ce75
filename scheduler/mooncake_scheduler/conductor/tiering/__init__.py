"""Which tier a session's KV should lie in: what is learned of its next turn, and what follows from that."""

from mooncake_scheduler.conductor.tiering.following import (
    KEEP_EVERY_S,
    STEERED_SHARE,
    Following,
    Wish,
)
from mooncake_scheduler.conductor.tiering.gaps import Gaps, NextTurn, Pace, Silent
from mooncake_scheduler.conductor.tiering.planner import PLAN_EVERY_S, READ_AHEAD_SHARE, Planner, Promotion
from mooncake_scheduler.conductor.tiering.scores import Scores
from mooncake_scheduler.conductor.tiering.sessions import Session, Sessions

__all__ = [
    "KEEP_EVERY_S", "PLAN_EVERY_S", "READ_AHEAD_SHARE", "STEERED_SHARE", "Following", "Gaps", "NextTurn",
    "Pace", "Planner", "Promotion", "Scores", "Session", "Sessions", "Silent", "Wish",
]  # fmt: skip
