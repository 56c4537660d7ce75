from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncakectl.local import PodUnsupportedError
from mooncakectl.local.backoff import RestartBackoff
from mooncakectl.local.probes import (
    ExecCommand,
    HttpGet,
    ProbeSpec,
    ProbeTracker,
    TcpSocket,
    Verdict,
    parse_probe,
)

SPEC = ProbeSpec(action=TcpSocket("127.0.0.1", 1))


def test_the_first_restart_is_at_once_then_waits_double_up_to_a_minute() -> None:
    backoff = RestartBackoff()
    assert [backoff.delay_s(0.1) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_ten_minutes_of_running_begin_anew() -> None:
    backoff = RestartBackoff()
    for _ in range(5):
        backoff.delay_s(1)
    assert backoff.delay_s(600) == 0
    assert backoff.delay_s(599) == 1


@given(st.lists(st.floats(0, 599), min_size=1, max_size=2000))
def test_waits_never_shrink_while_a_container_keeps_crashing(runs_s: list[float]) -> None:
    backoff = RestartBackoff()
    delays = [backoff.delay_s(ran) for ran in runs_s]
    assert delays == sorted(delays)
    assert delays[0] == 0
    assert max(delays) <= 60


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_a_verdict_changes_only_after_its_threshold_of_equal_results(
    results: list[bool], successes: int, failures: int
) -> None:
    spec = ProbeSpec(action=SPEC.action, success_threshold=successes, failure_threshold=failures)
    tracker = ProbeTracker(spec)
    for count in range(1, len(results) + 1):
        before = tracker.verdict
        after = tracker.observe(results[count - 1])
        if after is not before:
            needed = successes if after is Verdict.PASSING else failures
            assert results[count - needed : count] == [after is Verdict.PASSING] * needed
    if len(results) >= max(successes, failures) and len(set(results)) == 1:
        assert tracker.verdict is (Verdict.PASSING if results[0] else Verdict.FAILING)


def command(words: list[str]) -> tuple[str, ...]:
    return tuple(words)


def test_probes_are_read_with_kubernetes_defaults_and_named_ports() -> None:
    http = parse_probe(
        {"httpGet": {"path": "healthz", "port": "api"}}, where="p", ports={"api": 8001}, command=command
    )
    assert http == ProbeSpec(HttpGet("http://127.0.0.1:8001/healthz"), 0, 10, 1, 1, 3)
    tcp = parse_probe(
        {"tcpSocket": {"port": "6379"}, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 30},
        where="p",
        ports={},
        command=command,
    )
    assert tcp == ProbeSpec(TcpSocket("127.0.0.1", 6379), 0, 1, 2, 1, 30)
    run = parse_probe({"exec": {"command": ["redis-cli", "ping"]}}, where="p", ports={}, command=command)
    assert run is not None
    assert run.action == ExecCommand(("redis-cli", "ping"))
    assert parse_probe(None, where="p", ports={}, command=command) is None


def test_a_probe_that_cannot_be_run_says_where_it_stands() -> None:
    with pytest.raises(PodUnsupportedError, match=r"^Pod a: startupProbe: only httpGet"):
        parse_probe({"grpc": {"port": 1}}, where="Pod a: startupProbe", ports={}, command=command)
    with pytest.raises(PodUnsupportedError, match=r"names no port 'web'"):
        parse_probe({"tcpSocket": {"port": "web"}}, where="Pod a: x", ports={}, command=command)
