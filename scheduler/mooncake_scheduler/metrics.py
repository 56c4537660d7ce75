"""Metrics of the gateway: counted in plain numbers on the hot path, turned into Prometheus' form when asked.

Names: routers.md §6.5. Labels are bounded: reasons, phases, outcomes and roles are fixed sets, and instances
are those of the roster.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mooncake_scheduler.gateway.decisions import Decision
from mooncake_scheduler.gateway.lifecycle import Phase, Remedy, Setback
from mooncake_scheduler.recent import WINDOWS_S, Recent

Bounds: TypeAlias = Sequence[float]

LATENCY_S: Bounds = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
STEP_S: Bounds = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
OVERHEAD_S: Bounds = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 2.5)
ERROR_S: Bounds = (
    -30.0, -10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, -0.003, 0.0,
    0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
)  # fmt: skip
ERROR_TOKENS: Bounds = (
    -8192.0, -2048.0, -512.0, -128.0, -32.0, -8.0, 0.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0,
)  # fmt: skip
RECENT: Final = 1024
"""Requests over which GET /stats takes percentiles."""


class Histogram:
    """Counts in buckets."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """In Prometheus' form."""
        return HistogramMetricFamily(name, text, buckets=self.buckets(), sum_value=self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it)."""
        so_far, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(so_far)))
        return buckets


class GatewayMetrics:
    """What one gateway counts. Durations are model seconds, but for its own overhead and the loop's lag.

    Args:
        ttft_target_s: a request with a later first token does not count as goodput.
        tbt_target_s: nor one with slower tokens.
        clock: wall seconds of any origin, for what was measured lately.
    """

    def __init__(
        self,
        ttft_target_s: float | None = None,
        tbt_target_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ttft_target_s = ttft_target_s
        self._tbt_target_s = tbt_target_s
        self.ttft_s = Histogram(LATENCY_S)
        self.tbt_s = Histogram(STEP_S)
        self.predicted_ttft_s = Histogram(LATENCY_S)
        self.ttft_error_s = Histogram(ERROR_S)
        self.tbt_error_s = Histogram(ERROR_S)
        self.output_error_tokens = Histogram(ERROR_TOKENS)
        self.decode_wait_s = Histogram(LATENCY_S)
        self.transfer_s = Histogram(LATENCY_S)
        self.match_s = Histogram(OVERHEAD_S)
        self.tokenise_s = Histogram(OVERHEAD_S)
        self.decide_s = Histogram(OVERHEAD_S)
        self.reserve_s = Histogram(OVERHEAD_S)
        self.prefill_s = Histogram(LATENCY_S)
        self.held_s = Histogram(LATENCY_S)
        self.overhead_s = Histogram(OVERHEAD_S)
        self.loop_lag_s = Histogram(OVERHEAD_S)
        self.admissions: Counter[tuple[str, str]] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.setbacks: Counter[tuple[str, str]] = Counter()
        self.cancellations: Counter[str] = Counter()
        self.goodput = 0
        self.unjudged = 0
        self.wasted_prefills = 0
        self.moves = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.recent_ttft_s: deque[float] = deque(maxlen=RECENT)
        self.recent_tbt_s: deque[float] = deque(maxlen=RECENT)
        self.lately = {"ttft": Recent(), "tbt": Recent()}
        self.started_s = time.time()

    # -- told by requests

    def admitted(self) -> None:
        """A request was admitted."""
        self.admissions["admitted", ""] += 1

    def refused(self, reason: str) -> None:
        """A request was not admitted."""
        self.admissions["refused", reason] += 1

    def overhead(self, seconds: float) -> None:
        """From the last byte of a request to its reservation, wall seconds."""
        self.overhead_s.observe(seconds)

    def moved(self) -> None:
        """A prefill that waited for its turn was bound to another instance."""
        self.moves += 1

    def wasted_prefill(self) -> None:
        """Decode refused a request whose prompt was computed."""
        self.wasted_prefills += 1

    def setback(self, setback: Setback, what: Remedy) -> None:
        """A leg was not served."""
        self.setbacks[setback.value, what.value] += 1

    def cancelled(self, phase: Phase) -> None:
        """A client left."""
        self.cancellations[phase.name.lower()] += 1

    def cached(self, prompt_tokens: int, cached_tokens: int) -> None:
        """An engine said how much of a prompt it did not compute."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def finished(self, decision: Decision) -> None:
        """A request has ended."""
        self.outcomes[decision.outcome] += 1
        placement = decision.placement
        if placement is not None:
            self.paths[_path(decision)] += 1
            self.predicted_ttft_s.observe(placement.ttft_s + placement.wait_s)
        if decision.decode_wait_s is not None:
            self.decode_wait_s.observe(decision.decode_wait_s)
        if decision.prefill_s is not None:
            self.prefill_s.observe(decision.prefill_s)
        if decision.outcome != "completed":
            return
        self.output_tokens += decision.output_tokens or 0
        if decision.ask is not None and decision.output_tokens:
            self.output_error_tokens.observe(decision.output_tokens - decision.ask.output_tokens)
        ttft_s, tbt_s = decision.ttft_s, decision.tbt_s
        ttft_target_s, tbt_target_s = self._targets_s(decision)
        if ttft_s is not None and decision.streamed:
            self.ttft_s.observe(ttft_s)
            self.recent_ttft_s.append(ttft_s)
            self.lately["ttft"].observe(self._clock(), ttft_s, ttft_target_s)
            if placement is not None:
                self.ttft_error_s.observe(ttft_s - placement.ttft_s - placement.wait_s)
        if tbt_s is not None:
            self.tbt_s.observe(tbt_s)
            self.recent_tbt_s.append(tbt_s)
            self.lately["tbt"].observe(self._clock(), tbt_s, tbt_target_s)
            if placement is not None:
                self.tbt_error_s.observe(tbt_s - placement.tbt_s)
        if decision.transfer_s is not None:
            self.transfer_s.observe(decision.transfer_s)
        self._judge(decision, ttft_target_s, tbt_target_s)

    def recently(self) -> dict[str, Any]:
        """The last minutes by window and latency, to be added to what other schedulers say."""
        now_s = self._clock()
        return {
            str(seconds): {name: recent.window(now_s, seconds) for name, recent in self.lately.items()}
            for seconds in WINDOWS_S
        }

    def _targets_s(self, decision: Decision) -> tuple[float | None, float | None]:
        if decision.world is None:
            return self._ttft_target_s, self._tbt_target_s
        # Targets that are multiples differ from request to request.
        return decision.world.slo.ttft_s, decision.world.slo.tbt_s

    def _judge(self, decision: Decision, ttft_target_s: float | None, tbt_target_s: float | None) -> None:
        """Count a completed request as within its targets or not, where its times are known at all."""
        ttft_s, tbt_s = decision.ttft_s, decision.tbt_s
        if _over(ttft_s, ttft_target_s) or _over(tbt_s, tbt_target_s):
            return
        measured = decision.streamed or (ttft_target_s is not None and ttft_s is not None)
        if not measured and not (ttft_target_s is None and tbt_target_s is None):
            # A whole answer shows neither its first token, but by its prefill leg, nor the gaps between.
            self.unjudged += 1
        else:
            self.goodput += 1

    # -- exposition

    def families(self) -> Iterable[Metric]:
        """All of it in Prometheus' form."""
        yield self.ttft_s.family("mooncake_ttft_seconds", "Time to first token of streams, model seconds.")
        yield self.tbt_s.family(
            "mooncake_tbt_seconds", "Time between tokens: mean of a stream's longest tenth of gaps."
        )
        yield self.predicted_ttft_s.family("mooncake_predicted_ttft_seconds", "TTFT predicted at placement.")
        yield labelled_histogram(
            "mooncake_prediction_error_seconds",
            "Measured less predicted, of streams: above 0 = later or slower than predicted.",
            "quantity", {"ttft": self.ttft_error_s, "tbt": self.tbt_error_s},
        )  # fmt: skip
        yield self.held_s.family(
            "mooncake_prefill_held_seconds", "Prefills that waited in the scheduler for their turn, how long."
        )
        yield self.output_error_tokens.family(
            "mooncake_output_error_tokens", "Tokens of completed answers less those predicted at placement."
        )
        yield self.decode_wait_s.family(
            "mooncake_decode_wait_seconds", "Prefilled requests: how long they waited for a place to decode."
        )
        yield self.prefill_s.family("mooncake_prefill_seconds", "Prefill legs, sent to answered.")
        yield self.transfer_s.family(
            "mooncake_transfer_seconds",
            "From the hand-over to the first token of decode: the KV's transfer and one step.",
        )
        yield labelled_histogram(
            "mooncake_router_overhead_seconds",
            "Wall seconds of this scheduler's own work, by stage; total = last byte to reservation.",
            "stage",
            {
                "tokenise": self.tokenise_s, "match": self.match_s, "decide": self.decide_s,
                "reserve": self.reserve_s, "total": self.overhead_s,
            },
        )  # fmt: skip
        yield self.match_s.family(
            "mooncake_index_match_seconds", "Wall seconds to find out who holds a prompt's prefix."
        )
        yield self.loop_lag_s.family(
            "mooncake_event_loop_lag_seconds", "Wall seconds by which the event loop was late."
        )
        yield _counter("mooncake_admission", "Requests decided on.", ("decision", "reason"), self.admissions)
        yield _counter("mooncake_requests", "Requests ended.", ("outcome",), _one(self.outcomes))
        yield _counter("mooncake_pair_decisions", "Placements by path.", ("path",), _one(self.paths))
        yield _counter(
            "mooncake_setbacks", "Legs not served, and what was done.", ("setback", "remedy"), self.setbacks
        )
        yield _counter("mooncake_cancellations", "Clients that left.", ("phase",), _one(self.cancellations))
        for name, text, value in (
            ("mooncake_goodput", "Requests completed within the targets.", self.goodput),
            ("mooncake_goodput_unjudged", "Requests completed whose times nothing showed.", self.unjudged),
            ("mooncake_prefill_moves", "Prefills bound to another instance while they waited.", self.moves),
            ("mooncake_wasted_prefills", "Prompts computed that decode refused.", self.wasted_prefills),
            ("mooncake_prompt_tokens", "Prompt tokens of legs that prefilled.", self.prompt_tokens),
            ("mooncake_cached_tokens", "Of these, tokens that were not computed.", self.cached_tokens),
            ("mooncake_output_tokens", "Tokens of completed answers.", self.output_tokens),
        ):
            yield CounterMetricFamily(name, text, value=value)


class Exposition(Collector):
    """Turns the numbers of several sources into one page.

    Args:
        sources: each gives its families when asked.
    """

    def __init__(self, *sources: Callable[[], Iterable[Metric]]) -> None:
        self._sources = sources
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for source in self._sources:
            yield from source()

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)


def gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """A gauge with labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def labelled_histogram(
    name: str, text: str, label: str, histograms: Mapping[str, Histogram]
) -> HistogramMetricFamily:
    """Histograms that differ in one label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], buckets=histogram.buckets(), sum_value=histogram.total)
    return family


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, count in counts.items():
        family.add_metric(label_values, count)
    return family


def _one(counts: Counter[str]) -> dict[tuple[str], int]:
    return {(label,): count for label, count in counts.items()}


def _path(decision: Decision) -> str:
    placement = decision.placement
    if placement is None or placement.prefill is None:
        return "whole"
    return "fetch" if placement.fetch_tokens else "pair"


def _over(value: float | None, target: float | None) -> bool:
    return value is not None and target is not None and value > target
