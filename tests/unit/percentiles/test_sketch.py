"""A sketch's percentiles are those of the values, to one per cent, and those of several are those of all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.percentiles import percentile
from mooncake_core.sketch import ACCURACY, Sketch

values_s = st.lists(st.floats(min_value=1e-5, max_value=1e4), min_size=1, max_size=200)
shares = st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0])


def sketch_of(values):
    made = Sketch()
    for value in values:
        made.add(value)
    return made


@given(values_s, shares)
def test_a_percentile_is_right_to_one_per_cent(values, share):
    exact = percentile(sorted(values), share)
    assert sketch_of(values).percentile(share) == pytest.approx(exact, rel=1.01 * ACCURACY)


@given(values_s, values_s, shares)
def test_sketches_of_several_add_up_to_that_of_all_over_the_wire(some, others, share):
    merged = Sketch.from_wire(json.loads(json.dumps(sketch_of(some).to_wire())))
    merged.merge(sketch_of(others))
    assert merged.percentile(share) == sketch_of(some + others).percentile(share)
    assert len(merged) == len(some) + len(others)


def test_values_of_zero_and_below_count_as_the_smallest():
    assert sketch_of([0.0, -1.0]).percentile(1.0) == pytest.approx(1e-6, rel=0.02)


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="a share lies above 0"):
        sketch_of([1.0]).percentile(share)


def test_no_values_have_no_percentile():
    with pytest.raises(ValueError, match="nothing was measured"):
        Sketch().percentile(0.9)


@pytest.mark.parametrize("wire", [{"x": 1}, {"1": "many"}, {"1": -1}])
def test_what_is_no_sketch_is_refused(wire):
    with pytest.raises(ValueError, match=r"invalid literal|negative"):
        Sketch.from_wire(wire)
