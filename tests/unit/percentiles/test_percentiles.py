"""Percentiles are measured values, by nearest rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.percentiles import percentile


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 5), (0.9, 9), (0.91, 10), (0.99, 10), (1.0, 10), (0.01, 1)]
)
def test_of_ten_values_the_p90_is_the_ninth(share: float, expected: float) -> None:
    assert percentile(list(range(1, 11)), share) == expected


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=300),
    st.integers(1, 100).map(lambda number: number / 100),
)
def test_the_share_and_no_smaller_value_is_not_exceeded(values: list[float], share: float) -> None:
    found = percentile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.1)])
def test_what_has_no_answer_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"percentile|share"):
        percentile(values, share)
