"""What must hold of those who wait for a place to decode, and of who is let into that wait."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import InstanceLoad, SeatLimits
from mooncake_core.registry import Instance, Role
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.holding import Held, Line, has_plenty, seat_limits
from mooncake_scheduler.conductor.model import Ask, InstanceView, Refused, Slo
from mooncake_scheduler.conductor.waiting import PlaceWaits
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import ROUND_COSTS, decode, instance, prefill, world

few = settings(max_examples=150, deadline=None)
NOW_S = 100.0
COSTS = CostModels(default=ROUND_COSTS)


def limits_of(slo: Slo, there: Instance) -> SeatLimits:
    return seat_limits(there, ROUND_COSTS, slo, 0.95, 40.0)


fared = st.lists(
    st.tuples(st.integers(1, 20_000), st.floats(0, 40), st.floats(NOW_S - 90, NOW_S), st.booleans()),
    max_size=30,
)


def waits_of(outcomes: list[tuple[int, float, float, bool]]) -> PlaceWaits:
    waits = PlaceWaits()
    for need_tokens, wait_s, at_s, found in sorted(outcomes, key=lambda each: each[2]):
        waits.observe(need_tokens, wait_s, at_s, found=found)
    return waits


@few
@given(fared, st.integers(1, 20_000), st.integers(1, 20_000), st.floats(0, 40), st.floats(0, 40))
def test_a_chance_never_grows_with_the_size_nor_as_time_gets_shorter(
    outcomes: list[tuple[int, float, float, bool]], one: int, other: int, shorter_s: float, longer_s: float
) -> None:
    waits = waits_of(outcomes)
    small, large = sorted((one, other))
    shorter_s, longer_s = sorted((shorter_s, longer_s))
    best = waits.chance(small, longer_s, NOW_S)
    for need_tokens, within_s in ((small, shorter_s), (large, longer_s), (large, shorter_s)):
        chance = waits.chance(need_tokens, within_s, NOW_S)
        assert (chance is None) == (best is None)
        assert chance is None or best is None or 0 < chance <= best < 1


@st.composite
def decodes(draw: st.DrawFn) -> list[InstanceView]:
    views = []
    for number in range(draw(st.integers(1, 3))):
        batch = draw(st.integers(0, 6))
        arriving = draw(st.integers(0, 3))
        ends = [
            (1_000 + draw(st.integers(-5, 400)), 1, draw(st.integers(1, 3_000)))
            for _ in range(batch + arriving)
        ]
        coming = sorted((1_000 + draw(st.integers(-5, 60)), 1, each[2]) for each in ends[batch:])
        load = InstanceLoad(
            batch=batch,
            arriving=arriving,
            kv_tokens=sum(each[2] for each in ends),
            prefill_ends=tuple(coming),
            decode_ends=tuple(sorted(ends)),
        )
        views.append(
            decode(
                f"d{number}", load=load,
                kv_capacity_tokens=draw(st.sampled_from([0, 8_000, 20_000])),
                max_batch=draw(st.sampled_from([0, 4, 8])),
            )
        )  # fmt: skip
    return views


slos = st.builds(Slo, st.none() | st.floats(1, 40), st.none() | st.floats(0.02, 0.06))


@few
@given(
    decodes(), fared, slos, st.integers(1, 9_000), st.integers(1, 900), st.floats(0.3, 1), st.floats(0.3, 1)
)
def test_where_requests_may_wait_a_tighter_target_never_turns_a_refusal_into_an_admission(
    views: list[InstanceView],
    outcomes: list[tuple[int, float, float, bool]],
    slo: Slo,
    prompt: int,
    output: int,
    by: float,
    tbt_by: float,
) -> None:
    def decided(targets: Slo) -> bool:
        conductor = Conductor(
            create("kv-centric"), Admission(AdmissionMode.PREDICTIVE, holding=True), COSTS, random.Random(1)
        )
        conductor.waits = waits_of(outcomes)
        seen = world([prefill("p", queued_s=2.0)], views, now_s=NOW_S)
        ask = Ask("q", prompt, output)
        return not isinstance(conductor.decide(ask, structs.replace(seen, slo=targets)), Refused)

    tighter = Slo(
        None if slo.ttft_s is None else by * slo.ttft_s, None if slo.tbt_s is None else tbt_by * slo.tbt_s
    )
    assert decided(slo) or not decided(tighter)


requests = st.lists(
    st.tuples(st.integers(1, 9_000), st.integers(1, 900), st.integers(-1, 1), st.floats(0, 90)),
    min_size=1, max_size=12,
)  # fmt: skip


@few
@given(decodes(), requests, st.sampled_from([None, 0.03, 0.05]))
def test_places_are_given_within_the_limits_to_everybody_who_fits_and_to_nobody_twice(
    views: list[InstanceView], waiting: list[tuple[int, int, int, float]], tbt_s: float | None
) -> None:
    line, slo, source = Line(limits_of), Slo(60.0, tbt_s), instance("p", Role.PREFILL)
    for number, (prompt, output, priority, arrived_s) in enumerate(waiting):
        ask = Ask(f"r{number}", prompt, output, priority=priority)
        line.join(Held(ask, source, "d0", slo, arrived_s, 95.0, 130.0))
    order = [(-held.ask.priority, held.arrived_s) for held in line.held]
    assert order == sorted(order)

    seats = line.seats(NOW_S, views, COSTS)
    assert len({seat.held.ask.id for seat in seats}) == len(seats)
    state = {
        view.instance.id: [
            view.instance,
            view.load.batch,
            view.load.kv_tokens - sum(each[2] for each in view.load.prefill_ends),
        ]
        for view in views
    }
    for held in line.held:
        need = held.ask.prompt_tokens + held.ask.output_tokens
        free = [
            name
            for name, (there, batch, kv_tokens) in state.items()
            if limits_of(slo, there).exceeded(batch, kv_tokens, need) is None
        ]
        seat = next((seat for seat in seats if seat.held is held), None)
        assert (seat is not None) == bool(free)
        if seat is not None:
            assert seat.decode.id in free
            assert seat.decode.id == "d0" or "d0" not in free
            state[seat.decode.id][1] += 1
            state[seat.decode.id][2] += need
    # Nobody has left the line by being offered a place.
    assert len(line) == len(waiting)
    for seat in seats:
        assert line.leave(seat.held.ask.id) is seat.held
        assert line.leave(seat.held.ask.id) is None
    assert len(line) == len(waiting) - len(seats)


needs = st.lists(st.integers(1, 9_000), min_size=1, max_size=8)
TBTS = st.sampled_from([None, 0.03, 0.05])
CHANCES = st.randoms(use_true_random=False)


@few
@given(needs, needs, st.integers(0, 60), TBTS, CHANCES)
def test_where_there_is_plenty_all_find_a_place_with_as_many_again_unseen(
    decoding: list[int], promised: list[int], max_batch: int, tbt_s: float | None, chance: random.Random
) -> None:
    there = structs.replace(instance("d0", Role.DECODE), max_batch=max_batch, kv_capacity_tokens=150_000)
    limits = limits_of(Slo(60.0, tbt_s), there)
    load = InstanceLoad(batch=len(decoding), arriving=len(promised), kv_tokens=sum(decoding) + sum(promised))
    if not has_plenty(load, limits, promised[0]):
        return
    coming = [*promised, *decoding, *promised]
    chance.shuffle(coming)
    batch, kv_tokens = len(decoding), sum(decoding)
    for need in coming:
        assert limits.exceeded(batch, kv_tokens, need) is None
        batch, kv_tokens = batch + 1, kv_tokens + need
