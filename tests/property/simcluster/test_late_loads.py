"""Loads that are known late: placing and admitting go by what was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_core.ledger import Reservation
from mooncake_core.ledger.board import Board
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.reports import LateLoads
from mooncake_simulator.cluster.series import swing
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import Request


def burst(count: int, every_ms: float, tokens: int, output: int) -> list[Request]:
    """Prompts that share nothing."""
    blocks = -(-tokens // 512)
    return [
        Request(
            timestamp_ms=at * every_ms,
            input_length=tokens,
            output_length=output,
            hash_ids=tuple(range(at * blocks, (at + 1) * blocks)),
        )
        for at in range(count)
    ]


def test_each_look_sees_what_was_that_long_before() -> None:
    agenda, board = Agenda(), Board()
    late = LateLoads(agenda, board, 10.0)
    seen = []
    for at_s in (0.0, 4.0, 11.0, 15.0):
        agenda.at(at_s, lambda: seen.append(dict(late.next())))
    late.look_at([0.0, 4.0, 11.0, 15.0])
    reservation = Reservation("q", "p", 1.0, "d", 100, 5.0, 9.0)
    agenda.at(3.0, board.book.add, reservation, 3.0)
    agenda.run()
    assert [sorted(loads) for loads in seen] == [[], [], [], ["d", "p"]]


def test_arrivals_within_the_age_of_reports_do_not_see_one_another() -> None:
    trace = burst(8, 10.0, 20_000, 10)
    spec = ClusterSpec(8, 2, fetch="none", policy="load-balance")
    prompt = simulate(spec, trace, seed=1)
    late = simulate(replace(spec, load_age_s=5.0), trace, seed=1)
    # Each sees the others' work and goes elsewhere; those who see nothing meet by chance.
    assert max(prompt.ttfts_s()) == pytest.approx(min(prompt.ttfts_s()), rel=0.05)
    assert max(late.ttfts_s()) > 1.5 * min(late.ttfts_s())


@pytest.mark.parametrize("mode", AdmissionMode)
def test_late_loads_lose_nobody_and_give_the_same_result_again(mode: AdmissionMode) -> None:
    trace = burst(150, 200.0, 6_000, 300)
    spec = ClusterSpec(4, 1, admission=mode, ttft_target_s=3.0, tbt_target_s=0.031, load_age_s=3.0)
    result = simulate(spec, trace, seed=3)
    assert result.completed + result.refused == len(trace)
    assert result == simulate(spec, trace, seed=3)


def test_early_refusal_by_late_loads_swings_more_than_by_loads_of_now() -> None:
    # The papers' Fig. 9: who decides by decode's load of a while ago admits and refuses in waves.
    trace = burst(1_500, 150.0, 6_000, 300)
    spec = ClusterSpec(
        8, 1, admission=AdmissionMode.EARLY, ttft_target_s=10.0, tbt_target_s=0.0335, fetch="none"
    )
    swings = []
    for age_s in (0.0, 10.0):
        result = simulate(replace(spec, load_age_s=age_s), trace, seed=1)
        assert result.load is not None
        swings.append(swing(result.load.prefill[5:], windows=1))
    assert swings[1] > 1.3 * swings[0]


def test_an_age_that_is_no_number_of_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match="load_age_s is a finite number, 0 or more"):
        ClusterSpec(1, 1, load_age_s=-1.0)
