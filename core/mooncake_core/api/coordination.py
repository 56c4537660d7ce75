"""What pools of one cluster owe each other."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from mooncake_core.api.base import ApiModel, Rule, Write
from mooncake_core.api.scalars import PERCENT_PATTERN, Ratio, Seconds
from mooncake_core.api.support import not_yet_value

DEFAULT_MAX_SKEW = 0.25
DEFAULT_PROGRESS_DEADLINE_S = 1800


class PoolRatio(ApiModel):
    """Bounds of prefill instances per decode instance."""

    min_prefill_per_decode: Ratio | None = None
    max_prefill_per_decode: Ratio | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda r: (
                r.min_prefill_per_decode is None
                or r.max_prefill_per_decode is None
                or float(r.min_prefill_per_decode) <= float(r.max_prefill_per_decode)
            ),
            "!has(self.minPrefillPerDecode) || !has(self.maxPrefillPerDecode) || "
            "double(self.minPrefillPerDecode) <= double(self.maxPrefillPerDecode)",
            "must be <= maxPrefillPerDecode; exchange the two",
            at="minPrefillPerDecode",
        ),
    )

    def allows(self, prefill: int, decode: int) -> bool:
        """Whether so many instances keep the bounds; true while a side is empty."""
        if prefill == 0 or decode == 0:
            return True
        lowest = float(self.min_prefill_per_decode or 0)
        highest = float(self.max_prefill_per_decode or "inf")
        return lowest <= prefill / decode <= highest


MaxSkew = Annotated[
    str, StringConstraints(pattern=PERCENT_PATTERN, max_length=8), Write("a percentage, e.g. 25%")
]


class Rollout(ApiModel):
    """How a new revision replaces the old one over all pools."""

    max_skew: MaxSkew | None = None
    """How far one pool may be updated ahead of another, one instance at least; left out: 25%."""
    pairing: Literal["SameRevision"] = "SameRevision"
    """Prefill and decode exchange KV only inside one revision."""
    progress_deadline_seconds: Seconds | None = None
    """How long a rollout may go without any progress before it counts as stuck; left out: 1800."""

    @property
    def skew(self) -> float:
        """`maxSkew` as a share."""
        return float(self.max_skew.removesuffix("%")) / 100 if self.max_skew else DEFAULT_MAX_SKEW

    @property
    def progress_deadline_s(self) -> float:
        """`progressDeadlineSeconds`, or its default."""
        return float(self.progress_deadline_seconds or DEFAULT_PROGRESS_DEADLINE_S)


class RoleConversion(ApiModel):
    """Whether instances change between prefill and decode."""

    mode: Literal["Disabled", "Restart", "Runtime"] = "Disabled"

    RULES: ClassVar[tuple[Rule, ...]] = (
        not_yet_value(
            "mode",
            lambda c: c.mode == "Disabled",
            "self.mode == 'Disabled'",
            "role conversion",
            "write Disabled, or leave it out",
        ),
    )


Gpus = Annotated[int, Field(ge=1, le=100_000), Write("GPUs of all pools together, e.g. 64")]


class Coordination(ApiModel):
    """Bounds over all pools of a cluster."""

    ratio: PoolRatio | None = None
    rollout: Rollout | None = None
    role_conversion: RoleConversion | None = None
    gpu_budget: (
        Annotated[int, Field(ge=1, le=100_000), Write("GPUs of all pools together, e.g. 64")] | None
    ) = None
