"""Turns at a prefill instance: promises are kept, short ones go first, nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.ledger import InstanceLoad, Waiting
from mooncake_scheduler.conductor.order import ROUNDING_S, QueueOrder

NOW_S = 1_000.0
ORDER = QueueOrder()

waits = st.builds(
    Waiting,
    st.integers(0, 80).map(lambda eighths: NOW_S - eighths / 8),
    st.integers(1, 80).map(lambda eighths: eighths * 125_000),
    st.just(inf) | st.integers(0, 200).map(lambda eighths: NOW_S + eighths / 8),
)


def broken(sequence: list[Waiting], begin_s: float) -> int:
    """How many promises a sequence breaks."""
    count, end_s = 0, begin_s
    for each in sequence:
        end_s += each.cost_us / 1e6
        count += end_s > each.latest_end_s + ROUNDING_S
    return count


def ends_added_up_s(sequence: list[Waiting]) -> float:
    return sum(each.cost_us * (len(sequence) - at) for at, each in enumerate(sequence)) / 1e6


@settings(max_examples=200, deadline=None)
@given(st.lists(waits, max_size=6))
def test_where_some_order_keeps_all_promises_so_does_this_one(waiting: list[Waiting]) -> None:
    found = ORDER.sequence(waiting, NOW_S)
    assert sorted(found) == sorted(waiting)
    if any(broken(list(each), NOW_S) == 0 for each in permutations(waiting)):
        assert broken(found, NOW_S) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(waits, max_size=6))
def test_of_those_that_came_together_no_order_that_keeps_the_promises_has_a_lower_mean(
    waiting: list[Waiting],
) -> None:
    together = [each._replace(reserved_s=NOW_S) for each in waiting]
    keeping = [list(each) for each in permutations(together) if broken(list(each), NOW_S) == 0]
    if keeping:
        best_s = min(map(ends_added_up_s, keeping))
        assert ends_added_up_s(ORDER.sequence(together, NOW_S)) == pytest.approx(best_s)


@settings(max_examples=100, deadline=None)
@given(st.lists(waits, max_size=12), st.randoms(use_true_random=False), st.floats(0, 20))
def test_all_who_see_the_same_agree(waiting: list[Waiting], chance: Random, ahead_s: float) -> None:
    shuffled = list(waiting)
    chance.shuffle(shuffled)
    assert ORDER.sequence(shuffled, NOW_S + ahead_s) == ORDER.sequence(waiting, NOW_S + ahead_s)


@settings(max_examples=100, deadline=None)
@given(st.lists(waits.map(lambda each: each._replace(latest_end_s=inf)), max_size=12))
def test_nobody_is_overtaken_by_what_comes_much_later(waiting: list[Waiting]) -> None:
    sequence = ORDER.sequence(waiting, NOW_S)
    for at, each in enumerate(sequence):
        for before in sequence[:at]:
            assert before.reserved_s - each.reserved_s <= each.cost_us / 1e6 / ORDER.ageing + ROUNDING_S


@settings(max_examples=200, deadline=None)
@given(st.lists(waits, min_size=1, max_size=8), st.floats(0, 10))
def test_a_newcomer_that_claims_no_promise_breaks_none(waiting: list[Waiting], ahead_s: float) -> None:
    load = a_load(waiting, ahead_s)
    before = broken(ORDER.sequence(waiting, NOW_S + ahead_s), NOW_S + ahead_s)
    newcomer = Waiting(NOW_S, 125_000, inf)
    joined = ORDER.join(load, newcomer, NOW_S)
    assert 0 <= joined.behind <= len(waiting)
    assert joined.queue_s >= ahead_s - ROUNDING_S
    if before == 0:
        with_it = ORDER.sequence([*waiting, newcomer], NOW_S + ahead_s)
        assert broken(with_it, NOW_S + ahead_s) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(waits, max_size=6), st.integers(1, 40))
def test_a_newcomer_can_be_promised_its_earliest_end_and_nothing_earlier(
    waiting: list[Waiting], eighths: int
) -> None:
    if broken(ORDER.sequence(waiting, NOW_S), NOW_S):
        return
    cost_s = eighths / 8
    earliest_s = ORDER.earliest_end_s(a_load(waiting, 0.0), cost_s, NOW_S)
    promised = Waiting(NOW_S, round(cost_s * 1e6), earliest_s)
    assert broken(ORDER.sequence([*waiting, promised], NOW_S), NOW_S) == 0
    if all(each.latest_end_s < inf for each in waiting) and earliest_s > NOW_S + cost_s:
        sooner = promised._replace(latest_end_s=earliest_s - 1 / 8)
        assert all(broken(list(each), NOW_S) for each in permutations([*waiting, sooner]))


def a_load(waiting: list[Waiting], ahead_s: float) -> InstanceLoad:
    """An instance that is busy for so long, and who waits there."""
    return InstanceLoad(
        queued_s=ahead_s + sum(each.cost_us for each in waiting) / 1e6,
        queued=len(waiting) + 1,
        waiting=tuple(sorted(waiting)),
    )


@dataclass
class Instance:
    """One prompt at a time; who comes is promised to end within its patience, or leaves."""

    now_s: float = NOW_S
    free_s: float = NOW_S
    waiting: list[Waiting] = field(default_factory=list)
    ended_s: dict[Waiting, float] = field(default_factory=dict)

    def comes(self, cost_s: float, patience_s: float) -> bool:
        load = a_load(self.waiting, max(0.0, self.free_s - self.now_s))
        due_s = self.now_s + patience_s
        if patience_s < inf and ORDER.earliest_end_s(load, cost_s, self.now_s) > due_s:
            return False
        self.waiting.append(Waiting(self.now_s, round(cost_s * 1e6), due_s))
        return True

    def runs_until(self, until_s: float) -> None:
        while self.waiting and self.free_s < until_s:
            begin_s = max(self.free_s, max(self.now_s, min(each.reserved_s for each in self.waiting)))
            chosen = ORDER.sequence(self.waiting, begin_s)[0]
            self.waiting.remove(chosen)
            self.free_s = self.ended_s[chosen] = begin_s + chosen.cost_us / 1e6
        self.now_s = until_s


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(1, 40), st.none() | st.integers(8, 160)), max_size=40)
)
def test_a_promise_once_given_is_kept(arrivals: list[tuple[int, int, int | None]]) -> None:
    one = Instance()
    for gap, cost, patience in arrivals:
        one.runs_until(one.now_s + gap / 8)
        one.comes(cost / 8, inf if patience is None else patience / 8)
    one.runs_until(inf)
    assert not one.waiting
    for each, end_s in one.ended_s.items():
        assert end_s <= each.latest_end_s + ROUNDING_S


def test_urgent_newcomers_without_end_do_not_keep_one_without_a_promise_waiting() -> None:
    one = Instance()
    one.comes(2.0, inf)
    one.comes(20.0, inf)
    patient = one.waiting[-1]
    admitted = 0
    for _ in range(1_000):
        one.runs_until(one.now_s + 0.25)
        admitted += one.comes(1.0, 30.0)
    assert admitted > 200
    assert one.waiting, "the row has not ended"
    assert patient in one.ended_s


def test_a_broken_promise_binds_no_more_but_its_request_still_ages() -> None:
    late = Waiting(NOW_S - 60, 5_000_000, NOW_S - 1)
    in_time = Waiting(NOW_S, 1_000_000, NOW_S + 1)
    young = Waiting(NOW_S, 4_000_000, inf)
    assert ORDER.sequence([young, late, in_time], NOW_S) == [in_time, late, young]


def test_the_next_is_named_a_little_before_the_instance_is_free_and_not_earlier() -> None:
    short, long = Waiting(NOW_S, 500_000, inf), Waiting(NOW_S - 1, 4_000_000, inf)
    assert ORDER.turn(a_load([long, short], 0.5), NOW_S, lead_s=0.1) is None
    assert ORDER.turn(a_load([long, short], 0.05), NOW_S, lead_s=0.1) == short
    assert ORDER.turn(a_load([], 0.0), NOW_S, lead_s=0.1) is None


def test_ageing_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="some wait for ever"):
        QueueOrder(ageing=0)
