"""What became of each request, and what that means for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mooncake_core.percentiles import percentile
from mooncake_simulator.cluster.replicas import Replicas
from mooncake_simulator.cluster.series import Load, swing
from mooncake_simulator.cluster.tiers import TierUse


@dataclass(slots=True)
class Outcome:
    """What became of one request. Seconds since the start of the trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    refused: str | None = None
    """Why it was refused."""
    failed: str | None = None
    """Why it was cut off after its first token."""
    placed_again: int = 0
    """How often it had to begin anew, because an instance died."""
    moved: int = 0
    """How often it was bound to another prefill instance while it waited."""
    wasted_prefill: bool = False
    """Refused after its prefill."""
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Of the cached ones, those that came from another instance or the store."""
    prefill_s: float = 0.0
    """Seconds that its prefill computed."""
    prefill_ended_s: float | None = None
    """When it had."""
    held_s: float = 0.0
    """Seconds for which it then waited for a place to decode."""
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    promised_ttft_s: float | None = None
    """What was promised at admission, and is kept by the order of turns; None = nothing."""
    tbt_s: float | None = None
    """None for an answer of one token, too."""
    predicted_tbt_s: float | None = None
    predicted_output_tokens: int | None = None
    ended_s: float | None = None

    @property
    def last_s(self) -> float:
        """When the last was heard of it."""
        return self.ended_s or self.prefill_ended_s or self.arrival_s

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def completed(self) -> bool:
        """Whether its last token came."""
        return self.ended_s is not None

    def effective(self, ttft_target_s: float | None, tbt_target_s: float | None) -> bool:
        """Whether it finished inside both targets (conductor.md's effective request)."""
        return (
            self.ended_s is not None
            and self.ttft_s is not None
            and (ttft_target_s is None or self.ttft_s <= ttft_target_s)
            and (tbt_target_s is None or self.tbt_s is None or self.tbt_s <= tbt_target_s)
        )


@dataclass(slots=True)
class Result:
    """A run: every request, and the instances' use.

    Shares are of all requests, refused ones included.
    """

    outcomes: Sequence[Outcome]
    ttft_target_s: float | None
    tbt_target_s: float | None
    span_s: float
    """From the first arrival to the last token."""
    prefill_busy_s: Sequence[float] = field(default_factory=list)
    decode_busy_s: Sequence[float] = field(default_factory=list)
    most_kv_tokens: int = 0
    """The most KV that a decode instance ever held."""
    put_off: int = 0
    """Times that a request had to leave its batch for want of memory."""
    load: Load | None = None
    """Of both stages, from the start of the trace to its last arrival."""
    tiers: TierUse | None = None
    """Where a shared store has tiers."""
    replicas: Replicas | None = None
    """Of popular blocks, over time."""

    @property
    def requests(self) -> int:
        return len(self.outcomes)

    @property
    def completed(self) -> int:
        return sum(outcome.completed for outcome in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(outcome.refused is not None for outcome in self.outcomes)

    @property
    def failed(self) -> int:
        return sum(outcome.failed is not None for outcome in self.outcomes)

    @property
    def wasted_prefills(self) -> int:
        return sum(outcome.wasted_prefill for outcome in self.outcomes)

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """How many were refused for what, the most frequent reason first."""
        return dict(Counter(o.refused for o in self.outcomes if o.refused is not None).most_common())

    @property
    def prefill_swing(self) -> float:
        """Standard deviation of the prefill instances' busy share over time."""
        return swing(self.load.prefill) if self.load else 0.0

    @property
    def goodput(self) -> float:
        """Share of requests that finished inside both targets."""
        return self.goodput_within(self.ttft_target_s, self.tbt_target_s)

    def goodput_within(self, ttft_target_s: float | None, tbt_target_s: float | None) -> float:
        """The share that would have been inside other targets: those of the run decided who was admitted."""
        effective = sum([outcome.effective(ttft_target_s, tbt_target_s) for outcome in self.outcomes])
        return effective / max(1, self.requests)

    @property
    def token_goodput(self) -> float:
        """The same, weighed by prompt and output tokens."""
        total = sum(outcome.tokens for outcome in self.outcomes)
        targets = self.ttft_target_s, self.tbt_target_s
        return sum(o.tokens for o in self.outcomes if o.effective(*targets)) / max(1, total)

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens that were not computed, of those of the requests that were prefilled."""
        seen = [outcome for outcome in self.outcomes if outcome.prefill_s]
        return sum(o.cached_tokens for o in seen) / max(1, sum(o.prompt_tokens for o in seen))

    @property
    def mean_ttft_s(self) -> float:
        return fmean(self.ttfts_s()) if self.ttfts_s() else float("nan")

    @property
    def mean_prefill_s(self) -> float:
        seen = [outcome.prefill_s for outcome in self.outcomes if outcome.prefill_s]
        return fmean(seen) if seen else float("nan")

    def prediction_errors_s(self) -> tuple[list[float], list[float]]:
        """What was measured less what was foretold, in rising order: of the TTFT, and of the TBT."""
        seen = [outcome for outcome in self.outcomes if outcome.completed]
        return (
            sorted(
                o.ttft_s - o.predicted_ttft_s
                for o in seen
                if o.ttft_s is not None and o.predicted_ttft_s is not None
            ),
            sorted(
                o.tbt_s - o.predicted_tbt_s
                for o in seen
                if o.tbt_s is not None and o.predicted_tbt_s is not None
            ),
        )

    def output_errors_tokens(self) -> list[int]:
        """Tokens of answers less those that were foretold, in rising order."""
        return sorted(
            o.output_tokens - o.predicted_output_tokens
            for o in self.outcomes
            if o.completed and o.predicted_output_tokens is not None
        )

    def ttfts_s(self) -> list[float]:
        """In rising order."""
        return sorted([outcome.ttft_s for outcome in self.outcomes if outcome.ttft_s is not None])

    def tbts_s(self) -> list[float]:
        """In rising order."""
        return sorted([outcome.tbt_s for outcome in self.outcomes if outcome.tbt_s is not None])

    def ttft_percentile_s(self, share: float) -> float:
        """The TTFT that this share of the requests does not exceed."""
        return percentile(self.ttfts_s(), share)
