"""The cheapest size, whatever keeps the SLO and whatever instances cost."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import Request
from mooncakectl.plan.demand import arrivals_s, beyond_any_size, least_size
from mooncakectl.plan.search import NoSizeError, Prices, Size, cheapest
from mooncakectl.plan.slo import Objective, Objectives, kept

MOST = Size(9, 7)
prices = st.builds(Prices, st.floats(0.1, 9), st.floats(0.1, 9))
corners = st.lists(st.builds(Size, st.integers(1, 11), st.integers(1, 9)), min_size=1, max_size=4)
sizes = [Size(p, d) for p in range(1, MOST.prefill + 1) for d in range(1, MOST.decode + 1)]


def _smaller(size: Size) -> list[Size]:
    each = [Size(size.prefill - 1, size.decode), Size(size.prefill, size.decode - 1)]
    return [one for one in each if min(one) > 0]


@given(corners, prices)
@example([Size(1, 6), Size(6, 1)], Prices(1.0, 1.0))
@settings(max_examples=1000)
def test_where_more_is_never_worse_nothing_cheaper_does_and_most_sizes_are_not_tried(
    corners: list[Size], prices: Prices
) -> None:
    asked = []

    def does(size: Size) -> bool:
        asked.append(size)
        return any(size.covers(corner) for corner in corners)

    good = [size for size in sizes if any(size.covers(corner) for corner in corners)]
    if not good:
        with pytest.raises(NoSizeError):
            cheapest(does, prices, least=Size(1, 1), most=MOST)
        # The largest, and half of its prefill instances with all of decode, again and again.
        assert asked == [MOST, Size(4, 7), Size(2, 7), Size(1, 7)]
        return
    found = cheapest(does, prices, least=Size(1, 1), most=MOST)
    assert found in good
    assert prices.of(found) == pytest.approx(min(map(prices.of, good)))
    assert not any(size in good for size in _smaller(found))
    assert len(asked) == len(set(asked))
    # Two halvings, where they meet, a third for the first step of the staircase, its steps, the neighbours.
    assert len(asked) <= 1 + 4 + 3 + 1 + 3 + MOST.prefill + MOST.decode + 2


@given(st.frozensets(st.sampled_from(sizes)), prices)
def test_where_more_can_do_harm_what_is_found_still_does_and_no_instance_can_be_taken_from_it(
    good: frozenset[Size], prices: Prices
) -> None:
    good = good | {MOST}
    found = cheapest(good.__contains__, prices, least=Size(1, 1), most=MOST)
    assert found in good
    assert not any(size in good for size in _smaller(found))


@given(st.integers(1, 9), st.integers(1, 7), prices)
def test_where_the_largest_hands_decode_too_much_fewer_prefill_instances_are_tried(
    most_prefill: int, least_decode: int, prices: Prices
) -> None:
    def does(size: Size) -> bool:
        return size.prefill <= most_prefill and size.decode >= least_decode

    assert cheapest(does, prices, least=Size(1, 1), most=MOST) == Size(1, least_decode)


@given(st.sampled_from(sizes), prices)
def test_what_may_not_be_chosen_is_not(limit: Size, prices: Prices) -> None:
    found = cheapest(
        lambda size: True, prices, least=Size(1, 1), most=MOST, allowed=lambda size: size.covers(limit)
    )
    assert found == limit


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    every_ms = draw(st.sampled_from([1.0, 50.0, 400.0]))
    return [
        Request(
            timestamp_ms=every_ms * at, input_length=draw(st.integers(500, 30_000)),
            output_length=draw(st.integers(1, 400)), hash_ids=tuple(range(at * 64, at * 64 + 64)),
        )
        for at in range(draw(st.integers(5, 30)))
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(traces(), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([1.0, 5.0]), st.sampled_from([0.03, 0.1]))
def test_no_size_below_the_least_keeps_the_slo(
    trace: list[Request], share: float, ttft_s: float, tbt_s: float
) -> None:
    objectives = Objectives(Objective(share, ttft_s), Objective(share, tbt_s))
    spec = ClusterSpec(1, 1, ttft_target_s=ttft_s, tbt_target_s=tbt_s)
    least = least_size(spec, _whole(trace), objectives, 1.0)
    for size in ((least.prefill - 1, 64), (64, least.decode - 1)):
        if min(size) > 0:
            result = simulate(ClusterSpec(*size, ttft_target_s=ttft_s, tbt_target_s=tbt_s), _whole(trace))
            assert not kept(result, objectives).keeps(objectives)


@settings(max_examples=60, deadline=None)
@given(
    traces(), st.integers(0, 40), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0.0268, 0.027, 0.1]), st.sampled_from(["none", "store"]), st.randoms(),
)  # fmt: skip
def test_what_is_said_to_be_beyond_any_size_a_large_one_does_not_keep(
    trace: list[Request], shared: int, share: float, ttft_s: float, tbt_s: float,
    fetch: Literal["none", "store"], chance: Random,
) -> None:  # fmt: skip
    # Of each prompt the beginning is that of all others, and the trace is in any order.
    asked = [
        msgspec.structs.replace(each, hash_ids=(*range(-shared, 0), *each.hash_ids[shared:]))
        for each in trace
    ]
    asked = _whole(asked)
    chance.shuffle(asked)
    objectives = Objectives(Objective(share, ttft_s), Objective(share, tbt_s))
    spec = ClusterSpec(64, 64, ttft_target_s=ttft_s, tbt_target_s=tbt_s, fetch=fetch, cache_tokens=None)
    if beyond_any_size(spec, asked, objectives):
        assert not kept(simulate(spec, asked), objectives).keeps(objectives)


def _whole(trace: list[Request]) -> list[Request]:
    """With the blocks that prompts of their lengths have."""
    return [
        Request(
            timestamp_ms=each.timestamp_ms, input_length=each.input_length, output_length=each.output_length,
            hash_ids=each.hash_ids[: -(-each.input_length // 512)],
        )
        for each in trace
    ]  # fmt: skip


def test_a_trace_out_of_order_spans_the_time_that_it_spans() -> None:
    trace = [
        Request(timestamp_ms=each, input_length=1, output_length=1, hash_ids=(1,))
        for each in (9_000.0, 1_000.0, 5_000.0)
    ]
    assert arrivals_s(trace, 2.0) == 4.0
