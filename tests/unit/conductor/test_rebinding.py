"""A prefill that waits is bound anew where that is clearly earlier, and nowhere else."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from mooncake_core.ledger import InstanceLoad, Waiting
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import InstanceView, Placement
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.rebinding import LEAST_GAIN_S, Move, Rebinding
from mooncake_scheduler.policies.kv_centric import KvCentric
from mooncake_testing.worlds import ROUND_COSTS, Script, ask, decode, prefill, world

NOW_S = 100.0
REBINDING = Rebinding(KvCentric().prefill_at, QueueOrder())
COSTS = CostModels(default=ROUND_COSTS)


def seconds(cost_s: float, reserved_s: float = NOW_S, latest_end_s: float = inf) -> Waiting:
    return Waiting(reserved_s, int(cost_s * 1e6), latest_end_s)


def a_line(*waiting: Waiting, handed_over_s: float = 0.0) -> InstanceLoad:
    queued_s = handed_over_s + sum(each.cost_us for each in waiting) / 1e6
    return InstanceLoad(queued_s=queued_s, queued=len(waiting) + (handed_over_s > 0), waiting=waiting)


def bound(prompt_tokens: int) -> Placement:
    """To `p0`, which has nothing of the prompt."""
    return KvCentric().place(ask(prompt_tokens), world([prefill("p0")]), Script())


def moved(
    there: InstanceView, mine: Waiting, *others: Waiting, costs: CostModels = COSTS, ahead_s: float = 0.0
) -> Move | None:
    """A prompt of 1 ms a token of what it costs, that waits at `p0` with others."""
    standings = REBINDING.standings(a_line(mine, *others, handed_over_s=ahead_s), NOW_S)
    tokens = mine.cost_us // 1_000
    return REBINDING.move(ask(tokens), bound(tokens), mine, standings[mine], there, costs, NOW_S)


def test_who_would_wait_goes_where_nobody_does() -> None:
    move = moved(prefill("p1"), seconds(2.0, NOW_S - 5), ahead_s=3.0)
    assert move is not None
    placement = move.placement
    assert placement.prefill is not None
    assert placement.prefill.id == "p1"
    assert move.worth_s == pytest.approx(3.0)
    # Its seconds count from its arrival, five seconds ago.
    assert (placement.queue_s, placement.ttft_s) == (pytest.approx(5.0), pytest.approx(7.0))


def test_a_gain_within_what_predictions_err_by_moves_nobody() -> None:
    assert moved(prefill("p1"), seconds(2.0), ahead_s=LEAST_GAIN_S - 0.01) is None
    assert moved(prefill("p1"), seconds(2.0), ahead_s=LEAST_GAIN_S + 0.01) is not None


def test_what_would_have_to_be_computed_again_counts() -> None:
    # Where it waits 1 900 of its 2 000 tokens are held: a tenth of a second, three quarters ahead of it.
    held = replace(bound(2_000), prefix_tokens=1_900)
    mine = seconds(0.1)
    standing = REBINDING.standings(a_line(mine, handed_over_s=0.75), NOW_S)[mine]
    empty, full = prefill("p1"), prefill("p1", hbm=1_500)
    assert REBINDING.move(ask(2_000), held, mine, standing, empty, COSTS, NOW_S) is None
    move = REBINDING.move(ask(2_000), held, mine, standing, full, COSTS, NOW_S)
    assert move is not None
    assert move.worth_s == pytest.approx(0.35)
    assert move.placement.prefix_tokens == 1_500


def test_the_relief_of_those_behind_counts_but_moves_nobody_who_gains_nothing() -> None:
    first, second, third = seconds(1.0), seconds(2.0), seconds(3.0)
    standings = REBINDING.standings(a_line(third, first, second, handed_over_s=0.5), NOW_S)
    assert [standings[each].end_s for each in (first, second, third)] == pytest.approx([1.5, 3.5, 6.5])
    assert [standings[each].relief_s for each in (first, second, third)] == pytest.approx([2.0, 2.0, 0.0])
    move = moved(prefill("p1"), first, second, third, ahead_s=0.5)
    assert move is not None
    assert move.worth_s == pytest.approx(2.5)
    assert moved(prefill("p1"), first, second, third) is None


def test_a_promise_goes_along() -> None:
    mine = seconds(2.0, NOW_S - 1, latest_end_s=NOW_S + 9)
    placement = replace(bound(2_000), promised_ttft_s=10.0)
    standing = REBINDING.standings(a_line(mine, handed_over_s=3.0), NOW_S)[mine]
    move = REBINDING.move(ask(2_000), placement, mine, standing, prefill("p1"), COSTS, NOW_S)
    assert move is not None
    assert move.placement.promised_ttft_s == 10.0
    assert move.placement.ttft_s < 10.0


def test_nobody_goes_where_it_may_not_or_where_nothing_is_known() -> None:
    mine = seconds(2.0)
    assert moved(prefill("p0"), mine, ahead_s=3.0) is None
    assert moved(prefill("p1", revision="r2"), mine, ahead_s=3.0) is None
    cold = CostModels({"": ROUND_COSTS, "new": CostModel(cold=True)})
    assert moved(prefill("p1", instance_class="new"), mine, ahead_s=3.0, costs=cold) is None


@pytest.mark.parametrize(
    ("load", "room"),
    [
        (InstanceLoad(), True),
        (a_line(handed_over_s=0.05), True),
        (a_line(handed_over_s=0.2), False),
        (a_line(seconds(0.01)), False),
        (InstanceLoad(queued_s=0.0, queued=1), False),
    ],
    ids=["idle", "about to end", "busy", "somebody waits", "overruns"],
)
def test_there_is_room_only_where_it_is_known_when_the_instance_will_be_free(
    load: InstanceLoad, room: bool
) -> None:
    assert load.has_room(0.1) is room


def test_decode_instances_stay_as_they_were() -> None:
    placement = KvCentric().place(ask(2_000), world([prefill("p0")], [decode("d7")]), Script())
    mine = seconds(2.0)
    standing = REBINDING.standings(a_line(mine, handed_over_s=3.0), NOW_S)[mine]
    move = REBINDING.move(ask(2_000), placement, mine, standing, prefill("p1"), COSTS, NOW_S)
    assert move is not None
    assert move.placement.decode.id == "d7"
