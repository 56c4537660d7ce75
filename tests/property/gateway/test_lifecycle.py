from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_scheduler.gateway.breaker import LONGEST_OPEN_S, THRESHOLD, Breaker, BreakerState
from mooncake_scheduler.gateway.lifecycle import (
    Phase,
    Remedy,
    RetryBudget,
    Setback,
    may_follow,
    remedy,
    setback_of_status,
)

phases = st.sampled_from(list(Phase))
setbacks = st.sampled_from(list(Setback))


@given(phase=phases, setback=setbacks, staged=st.booleans(), may_retry=st.booleans())
def test_nothing_is_tried_again_once_the_client_has_seen_a_token(
    phase: Phase, setback: Setback, staged: bool, may_retry: bool
) -> None:
    what = remedy(phase, setback, staged=staged, may_retry=may_retry)
    assert (what is Remedy.END_STREAM) == (phase >= Phase.DECODING)
    if not may_retry:
        assert what not in (Remedy.PLACE_ANEW, Remedy.HAND_OVER_AGAIN)


@given(setback=setbacks, staged=st.booleans())
def test_staged_kv_is_given_away_again_only_while_certainly_untouched(setback: Setback, staged: bool) -> None:
    what = remedy(Phase.HANDED_OVER, setback, staged=staged, may_retry=True)
    if what is Remedy.HAND_OVER_AGAIN:
        assert staged
        assert setback in (Setback.CONNECT, Setback.BACK_PRESSURE, Setback.GONE)


@given(status=st.integers(100, 599))
def test_4xx_and_back_pressure_are_no_faults(status: int) -> None:
    setback = setback_of_status(status)
    assert (setback is None) == (200 <= status < 300)
    if setback is not None:
        assert setback.is_fault == (not 400 <= status < 500 and status != 503)


@given(st.lists(phases, max_size=12))
def test_every_walk_along_allowed_phases_ends_or_goes_back_to_placing(walk: list[Phase]) -> None:
    now = Phase.RECEIVED
    for following in walk:
        if may_follow(now, following):
            handed_over_again = now is following is Phase.HANDED_OVER
            assert following > now or following is Phase.TOKENISED or handed_over_again
            now = following
    assert may_follow(now, Phase.DONE) or now is Phase.DONE


@given(requests=st.integers(0, 500), wanted=st.integers(0, 2000))
def test_retries_stay_within_their_share_of_the_requests(requests: int, wanted: int) -> None:
    budget = RetryBudget(share=0.2, burst=10)
    made = 0
    for number in range(max(requests, wanted)):
        if number < requests:
            budget.request()
        if number < wanted and not budget.empty:
            budget.spend()
            made += 1
    assert made <= 10 + 0.2 * requests + 1


@given(st.lists(st.sampled_from(["fail", "serve", "nothing"]), max_size=60))
def test_a_breaker_opens_on_faults_in_a_row_only_and_never_for_ever(outcomes: list[str]) -> None:
    breaker, now_s, row = Breaker(), 0.0, 0
    for outcome in outcomes:
        now_s += 0.01
        if not breaker.admits(now_s):
            assert row >= THRESHOLD or breaker.state is not BreakerState.CLOSED
            now_s += LONGEST_OPEN_S
        assert breaker.admits(now_s)
        breaker.sent(now_s)
        if outcome == "fail":
            breaker.failed(now_s)
            row += 1
        elif outcome == "serve":
            breaker.succeeded()
            row = 0
            assert breaker.state is BreakerState.CLOSED
    assert breaker.admits(now_s + LONGEST_OPEN_S)


def test_a_trial_that_says_nothing_leaves_the_breaker_half_open() -> None:
    breaker = Breaker(threshold=1)
    breaker.failed(0.0)
    assert not breaker.admits(0.5)
    assert breaker.admits(1.5)
    breaker.sent(1.5)
    assert not breaker.admits(1.6)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admits(3.0)
