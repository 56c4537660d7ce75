from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.api.scalars import duration_s, quantity, quantity_bytes


@pytest.mark.parametrize(
    ("text", "worth"),
    [("1", 1), ("1k", 1000), ("1Ki", 1024), ("200Gi", 200 * 2**30), ("1.5Ti", 3 * 2**39), ("2E", 2 * 10**18)],
)
def test_quantities_are_worth_what_kubernetes_says(text, worth):
    assert quantity_bytes(text) == worth


def test_thousandths_are_kept_and_round_up_in_bytes():
    assert quantity("1500m") == Decimal("1.5")
    assert quantity_bytes("1500m") == 2


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "-1", "1 Gi", "0x10"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="not a quantity"):
        quantity(text)


@given(st.integers(0, 10**15), st.sampled_from(["k", "M", "G", "Ki", "Mi", "Gi"]))
def test_a_larger_number_is_a_larger_quantity(number, unit):
    assert quantity(f"{number + 1}{unit}") > quantity(f"{number}{unit}")


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2.0), ("100ms", 0.1), ("0.5s", 0.5), ("1.5ms", 0.0015)])
def test_durations_are_seconds(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["2", "2m", "s", "-1s", "1h"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="not a duration"):
        duration_s(text)
