"""Amounts over time: nothing is lost between windows, and shares are shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.series import Series, swing
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads.traces import Request

spans = st.lists(st.tuples(st.floats(0, 500), st.floats(0, 100), st.floats(0, 5)), max_size=20)


@given(spans, st.sampled_from([0.3, 1.0, 10.0]))
def test_what_is_added_is_found_again_whatever_the_windows(
    spans: list[tuple[float, float, float]], window_s: float
) -> None:
    series = Series(window_s)
    for begin_s, length_s, rate in spans:
        series.add(begin_s, begin_s + length_s, rate)
    found = series.means(window_s * 4_000)
    assert len(found) == 4_000
    assert sum(found) * window_s == pytest.approx(sum(length_s * rate for _, length_s, rate in spans))


def test_a_span_over_three_windows_fills_the_middle_one() -> None:
    series = Series(10)
    series.add(5, 22)
    assert series.means(30) == pytest.approx([0.5, 1.0, 0.2])


def test_a_window_that_is_cut_short_is_not_told() -> None:
    series = Series(10)
    series.add(0, 40)
    assert series.means(24) == pytest.approx([1.0, 1.0])
    assert series.means(4) == pytest.approx([1.0])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.sampled_from([5.0, 300.0, 2_000.0]), st.integers(1, 4))
def test_shares_of_a_run_are_shares_however_much_is_left_when_the_last_request_comes(
    requests: int, every_ms: float, prefill: int
) -> None:
    trace = [
        Request(
            timestamp_ms=every_ms * at,
            input_length=9_000,
            output_length=200,
            hash_ids=tuple(range(18 * at, 18 * at + 18)),
        )
        for at in range(requests)
    ]
    load = simulate(ClusterSpec(prefill, 1, fetch="none"), trace).load
    assert load is not None
    assert all(0 <= share <= 1 + 1e-9 for share in [*load.prefill, *load.decode, *load.kv])


def test_a_steady_load_does_not_swing_and_one_that_alternates_does() -> None:
    assert swing([0.7] * 30) == pytest.approx(0.0)
    assert swing(([0.0] * 3 + [1.0] * 3) * 5) == pytest.approx(0.5)
    assert swing([]) == 0.0


def test_the_load_of_a_run_is_the_time_that_its_instances_were_busy() -> None:
    trace = [
        Request(
            timestamp_ms=700.0 * at,
            input_length=6_000,
            output_length=300,
            hash_ids=tuple(range(12 * at, 12 * at + 12)),
        )
        for at in range(80)
    ]
    # Whoever comes last, long after the others have ended, makes the load cover all of their time.
    trace.append(Request(timestamp_ms=400_000.0, input_length=1, output_length=1, hash_ids=(1_000_000,)))
    result = simulate(ClusterSpec(3, 2, fetch="none"), trace)
    load = result.load
    assert load is not None
    *_, last = result.outcomes
    assert sum(load.prefill) * load.window_s * 3 == pytest.approx(sum(result.prefill_busy_s) - last.prefill_s)
    assert sum(load.decode) * load.window_s * 2 == pytest.approx(sum(result.decode_busy_s))
    assert all(0 <= share <= 1 + 1e-9 for share in [*load.prefill, *load.decode, *load.kv])
    assert max(load.kv) > 0
