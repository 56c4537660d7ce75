"""One definition of a request's time between tokens, for whoever measures it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.slo import worst_gaps_mean
from mooncakectl.replay.outcome import tail_tbt_s

gaps = st.lists(st.floats(0, 100), min_size=1, max_size=200)


def test_an_answer_of_one_token_has_none():
    assert worst_gaps_mean([]) is None


@pytest.mark.parametrize(
    ("count", "looked_at"), [(1, 1), (9, 1), (10, 1), (11, 2), (19, 2), (20, 2), (21, 3)]
)
def test_never_less_than_a_tenth_of_the_gaps_is_looked_at(count, looked_at):
    found = worst_gaps_mean([1.0] * looked_at + [0.0] * (count - looked_at))
    assert found == 1.0
    if looked_at < count:
        assert worst_gaps_mean([1.0] * (looked_at - 1) + [0.0] * (count - looked_at + 1)) < 1.0


@given(gaps)
def test_it_lies_between_the_mean_and_the_longest_gap(found):
    tbt = worst_gaps_mean(found)
    assert sum(found) / len(found) - 1e-9 <= tbt <= max(found) + 1e-9


@given(gaps)
def test_the_replay_measures_by_the_same_definition(found):
    times = [0.0]
    for gap in found:
        times.append(times[-1] + gap)
    assert tail_tbt_s(times) == pytest.approx(worst_gaps_mean(found), abs=1e-6)
