"""Faults of an engine that neither `/health` nor a failing request shows."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mooncake_sidecar.engine.engine_probe import Load

_log = structlog.get_logger(__name__)

LEAK_AFTER_S = 60.0
"""KV that waits for its decode is in use at rest too, for a moment."""
SILENT_AFTER_BLOCKS = 16
HITLESS_AFTER_TOKENS = 500_000
HITLESS_AFTER_FINDABLE = 3
"""One or two prompts may be computed twice at the same time, or just when the store has dropped them."""


@dataclass(slots=True)
class Alarms:
    """Watches one engine; each alarm is logged when it begins and when it ends.

    Args:
        block_size_tokens: of the engine.
        publishes: whether the engine is set up to publish events.
    """

    block_size_tokens: int
    publishes: bool
    kv_leaked: bool = False
    """KV blocks stay in use though no request runs or waits (engines.md §4, rules 3 and 5)."""
    publisher_silent: bool = False
    """Prompts are computed and no event was ever published (ai-dynamo/dynamo issue 11984)."""
    metrics_missing: bool = False
    """The engine tells no metrics: its load is known from the ledger alone."""
    never_hit: bool = False
    """Prompts begin like others that are held, and nothing is ever found (vllm-project/vllm issue 51875)."""
    _resting_since_s: float | None = None
    _first_prompt_tokens: float | None = None
    _hitless_since: tuple[float, float, int] | None = None
    """Queries, hits and findable prompts at the last moment at which something had been found."""

    def observe(self, load: Load, messages: int, findable: int, now_s: float) -> None:
        """Look at the engine's metrics.

        Args:
            load: what they say now.
            messages: events heard in this life of the engine.
            findable: prompts, so far, whose beginning was there to be found (`findable.Findable`).
            now_s: a clock that never goes back, wall seconds.
        """
        self._watch_metrics(load)
        if load.is_told:
            self._watch_leak(load, now_s)
            self._watch_silence(load, messages)
            self._watch_hits(load, findable)

    def _watch_metrics(self, load: Load) -> None:
        if not load.is_told and not self.metrics_missing:
            _log.error(
                "the engine tells no metrics: its load and faults are invisible here, placement goes by what"
                " schedulers have promised it; vLLM tells none with --disable-log-stats"
            )
        elif self.metrics_missing and load.is_told:
            _log.info("the engine tells metrics")
        self.metrics_missing = not load.is_told

    def _watch_leak(self, load: Load, now_s: float) -> None:
        if load.running or load.waiting or load.kv_usage <= 0:
            self._resting_since_s = None
        elif self._resting_since_s is None:
            self._resting_since_s = now_s
        leaked = self._resting_since_s is not None and now_s - self._resting_since_s > LEAK_AFTER_S
        if leaked and not self.kv_leaked:
            _log.error("KV memory is in use though nothing runs", kv_usage=load.kv_usage)
        elif self.kv_leaked and not leaked:
            _log.info("KV memory that nothing used is free again")
        self.kv_leaked = leaked

    def _watch_silence(self, load: Load, messages: int) -> None:
        if not self.publishes:
            return
        if self._first_prompt_tokens is None:
            self._first_prompt_tokens = load.prompt_tokens
        computed = load.prompt_tokens - self._first_prompt_tokens
        silent = not messages and computed > SILENT_AFTER_BLOCKS * self.block_size_tokens
        if silent and not self.publisher_silent:
            _log.error(
                "the engine computes prompts and publishes no KV events: its cache is invisible to placement",
                prompt_tokens=computed,
            )
        elif self.publisher_silent and not silent:
            _log.info("the engine publishes KV events")
        self.publisher_silent = silent

    def _watch_hits(self, load: Load, findable: int) -> None:
        queries, hits = load.cache_queries_tokens, load.cache_hits_tokens
        if self._hitless_since is None or hits != self._hitless_since[1]:
            self._hitless_since = (queries, hits, findable)
        queried, missed = queries - self._hitless_since[0], findable - self._hitless_since[2]
        # Prompts that have nothing in common find nothing, and nothing is wrong with that.
        hitless = queried > HITLESS_AFTER_TOKENS and missed >= HITLESS_AFTER_FINDABLE
        if hitless and not self.never_hit:
            _log.error(
                "prompts begin like others that are held, and nothing is ever found in a cache: do all"
                " engines have the same PYTHONHASHSEED, block size and model arguments?",
                queried_tokens=queried,
                missed_prompts=missed,
            )
        elif self.never_hit and not hitless:
            _log.info("prompts find cached blocks")
        self.never_hit = hitless
