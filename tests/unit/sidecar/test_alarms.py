"""Faults that only metrics show."""

from mooncake_sidecar.engine.alarms import (
    HITLESS_AFTER_FINDABLE,
    HITLESS_AFTER_TOKENS,
    LEAK_AFTER_S,
    SILENT_AFTER_BLOCKS,
    Alarms,
)
from mooncake_sidecar.engine.engine_probe import Load


def load(**fields: float) -> Load:
    return Load(**({"running": 0, "waiting": 0, "kv_usage": 0.0, "prompt_tokens": 0.0} | fields))  # type: ignore[arg-type]


def test_kv_that_stays_in_use_at_rest_is_reported_until_it_is_free() -> None:
    alarms = Alarms(16, publishes=True)
    alarms.observe(load(kv_usage=0.2), 1, 0, 0.0)
    alarms.observe(load(kv_usage=0.2), 1, 0, LEAK_AFTER_S)
    assert not alarms.kv_leaked
    alarms.observe(load(kv_usage=0.2), 1, 0, LEAK_AFTER_S + 1)
    assert alarms.kv_leaked
    alarms.observe(load(), 1, 0, LEAK_AFTER_S + 2)
    assert not alarms.kv_leaked


def test_kv_in_use_while_requests_come_and_go_is_no_leak() -> None:
    alarms = Alarms(16, publishes=True)
    for second in range(500):
        alarms.observe(load(kv_usage=0.2, running=second % 50 == 0), 1, 0, float(second))
        assert not alarms.kv_leaked


def test_an_engine_that_computes_and_never_publishes_is_reported() -> None:
    alarms = Alarms(16, publishes=True)
    alarms.observe(load(prompt_tokens=1e6), 0, 0, 0.0)
    assert not alarms.publisher_silent
    alarms.observe(load(prompt_tokens=1e6 + 16 * SILENT_AFTER_BLOCKS + 1), 0, 0, 1.0)
    assert alarms.publisher_silent
    alarms.observe(load(prompt_tokens=2e6), 1, 0, 2.0)
    assert not alarms.publisher_silent


def test_an_engine_that_should_not_publish_may_be_silent() -> None:
    alarms = Alarms(16, publishes=False)
    alarms.observe(load(), 0, 0, 0.0)
    alarms.observe(load(prompt_tokens=1e6), 0, 0, 1.0)
    assert not alarms.publisher_silent


def test_prompts_that_are_held_and_never_found_are_reported_until_one_is_found() -> None:
    alarms = Alarms(16, publishes=True)
    # What was found, and missed, before the sidecar came says nothing of now.
    alarms.observe(load(cache_queries_tokens=9e6, cache_hits_tokens=5e6), 1, 7, 0.0)
    queried, missed = 9e6 + HITLESS_AFTER_TOKENS, 7 + HITLESS_AFTER_FINDABLE
    alarms.observe(load(cache_queries_tokens=queried, cache_hits_tokens=5e6), 1, missed, 1.0)
    assert not alarms.never_hit
    alarms.observe(load(cache_queries_tokens=queried + 1, cache_hits_tokens=5e6), 1, missed - 1, 2.0)
    assert not alarms.never_hit
    alarms.observe(load(cache_queries_tokens=queried + 1, cache_hits_tokens=5e6), 1, missed, 3.0)
    assert alarms.never_hit
    alarms.observe(load(cache_queries_tokens=queried + 100, cache_hits_tokens=5e6 + 16), 1, missed, 4.0)
    assert not alarms.never_hit


def test_prompts_without_anything_in_common_may_find_nothing_for_ever() -> None:
    alarms = Alarms(16, publishes=True)
    for second in range(100):
        alarms.observe(load(cache_queries_tokens=second * HITLESS_AFTER_TOKENS), 1, 0, float(second))
        assert not alarms.never_hit


def test_one_hit_now_and_then_is_enough() -> None:
    alarms = Alarms(16, publishes=True)
    for second in range(100):
        found = load(cache_queries_tokens=second * HITLESS_AFTER_TOKENS / 4, cache_hits_tokens=second // 3)
        alarms.observe(found, 1, second, float(second))
        assert not alarms.never_hit


def test_without_metrics_that_is_the_only_alarm() -> None:
    alarms = Alarms(16, publishes=True)
    for second in range(200):
        alarms.observe(load(is_told=False), 0, 0, float(second))
    assert alarms.metrics_missing
    assert not any((alarms.kv_leaked, alarms.publisher_silent, alarms.never_hit))
    alarms.observe(load(), 0, 0, 200.0)
    assert not alarms.metrics_missing
