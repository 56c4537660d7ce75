"""Service-level objectives: time to first token, time between tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from mooncake_core.api.base import ApiModel, Rule, Write
from mooncake_core.api.scalars import Duration, Ratio, duration_s


class SloTarget(ApiModel):
    """A limit that a share of requests must keep: absolute, or as a multiple of an idle single request."""

    percentile: Annotated[int, Field(ge=1, le=100), Write("a whole number, e.g. 90")] = 90
    target: Duration | None = None
    multiplier: Annotated[Ratio, Write('a number above 1 as text, e.g. "10"')] | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda t: (t.target is None) != (t.multiplier is None),
            "has(self.target) != has(self.multiplier)",
            'needs either target or multiplier; write target: 2s, or multiplier: "10"',
        ),
        Rule(
            lambda t: t.target is None or duration_s(t.target) > 0,
            "!has(self.target) || self.target.matches('[1-9]')",
            "must be more than 0; write e.g. 2s or 100ms",
            at="target",
        ),
        Rule(
            lambda t: t.multiplier is None or float(t.multiplier) > 1,
            "!has(self.multiplier) || double(self.multiplier) > 1.0",
            'must be more than 1; write e.g. "10"',
            at="multiplier",
        ),
    )


class SloSpec(ApiModel):
    """Targets of a cluster; left out: none, and nothing is refused for it."""

    ttft: SloTarget | None = None
    """Time to first token."""
    tbt: SloTarget | None = None
    """Time between tokens: the mean of a request's longest tenth of gaps."""
