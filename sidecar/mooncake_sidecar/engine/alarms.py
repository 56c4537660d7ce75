"""Faults of an engine that neither `/health` nor a failing request shows."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mooncake_sidecar.engine.engine_probe import Load

_log = structlog.get_logger(__name__)

LEAK_AFTER_S = 60.0
"""KV that waits for its decode is in use at rest too, for a moment."""
SILENT_AFTER_BLOCKS = 16


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
    _resting_since_s: float | None = None
    _first_prompt_tokens: float | None = None

    def observe(self, load: Load, messages: int, now_s: float) -> None:
        """Look at the engine's metrics.

        Args:
            load: what they say now.
            messages: events heard in this life of the engine.
            now_s: a clock that never goes back, wall seconds.
        """
        self._watch_leak(load, now_s)
        self._watch_silence(load, messages)

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
