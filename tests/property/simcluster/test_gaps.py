"""Runs of even growth say of an answer's gaps what the gaps themselves say."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_core.slo import worst_gaps_mean
from mooncake_simulator.cluster.gaps import Run, worst_gaps_mean_of

# Growth so small that many gaps are equal once rounded, and such as batches really have.
growths = st.one_of(st.just(0.0), st.floats(1e-19, 1e-16), st.floats(1e-9, 1e-3))
runs = st.builds(Run, st.floats(1e-3, 10.0), growths, st.integers(1, 200))
alike = st.builds(Run, st.sampled_from([0.05, 0.1]), growths, st.just(40))
lives = st.lists(st.one_of(runs, alike), max_size=12)


@given(lives)
@example([])
@example([Run(0.1, 1e-18, 60), Run(0.1, 1e-18, 60)])
@example([Run(0.1, 5e-324, 20), Run(0.2, 0.0, 1)])
def test_the_worst_mean_of_runs_is_that_of_all_their_gaps_to_the_bit(life: list[Run]) -> None:
    gaps_s = [first_s + growth_s * step for first_s, growth_s, steps in life for step in range(steps)]
    assert worst_gaps_mean_of(life) == worst_gaps_mean(gaps_s)
