import pytest

from mooncakectl.replay.outcome import Outcome, OutcomeKind, tail_tbt_s
from mooncakectl.replay.result import summarise


def test_the_tbt_of_a_request_is_the_mean_of_its_longest_tenth_of_gaps() -> None:
    gaps = [0.01] * 27 + [0.5, 0.4, 0.3]
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    assert tail_tbt_s(times) == pytest.approx(0.4)


def test_a_short_request_has_the_longest_gap_as_its_tbt_and_one_token_has_none() -> None:
    assert tail_tbt_s([1.0, 1.1, 1.4]) == pytest.approx(0.3)
    assert tail_tbt_s([1.0]) is None
    assert tail_tbt_s([]) is None


def completed(index: int, ttft_s: float, tbt_s: float | None) -> Outcome:
    return Outcome(
        index=index,
        kind=OutcomeKind.COMPLETED,
        started_s=10.0,
        ended_s=20.0,
        ttft_s=ttft_s,
        tbt_s=tbt_s,
        prompt_tokens=100,
        cached_tokens=25 * index,
        completion_tokens=10,
    )


def test_good_is_what_completes_within_both_slos_among_all_that_was_judged() -> None:
    outcomes = [
        completed(0, 1.0, 0.05),
        completed(1, 4.0, 0.05),  # too late
        completed(2, 1.0, 0.5),  # too slow
        completed(3, 1.0, None),  # one token has no gap
        Outcome(index=4, kind=OutcomeKind.REFUSED, reason="ttft", started_s=10, ended_s=10),
        Outcome(index=5, kind=OutcomeKind.INTERRUPTED, started_s=10, ended_s=11),
    ]
    result = summarise(outcomes, slo_ttft_s=30, slo_tbt_s=1.0, time_scale=10, speed=3, late_s=0)
    assert result.goodput == pytest.approx(2 / 5)
    assert result.duration_s == pytest.approx(100)
    assert result.goodput_requests_per_s == pytest.approx(0.02)
    assert result.token_hit_rate == pytest.approx(150 / 400)
    assert result.ttft.p90_s == pytest.approx(40)
    assert result.output_tokens_per_s == pytest.approx(0.4)
    assert (result.requests, result.completed, result.refused, result.interrupted) == (6, 4, 1, 1)


def test_a_replay_in_which_nothing_happened_has_a_summary() -> None:
    result = summarise([], slo_ttft_s=30, slo_tbt_s=0.1, time_scale=1, speed=1, late_s=0)
    assert result.goodput == 0
    assert result.token_hit_rate is None
    assert result.ttft.p50_s is None
