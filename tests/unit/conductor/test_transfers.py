"""What moving KV takes, where nobody has said it."""

from __future__ import annotations

import pytest

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.cost import CostModel, CostModels, TransferFitting
from mooncake_scheduler.conductor.cost.transfers import LEAST_SEEN, LEAST_TOKENS

KV_BYTES = 100_000
COLD = CostModel(cold=True, kv_bytes_per_token=KV_BYTES)


def test_until_enough_was_seen_a_transfer_counts_as_free() -> None:
    costs = CostModels(default=COLD)
    fitting = TransferFitting(costs)
    for _ in range(LEAST_SEEN - 1):
        fitting.observe_fetch("p", 10_000, 1.0)
    assert costs.of_class("p").transfer_s(10_000) == 0
    fitting.observe_fetch("p", 10_000, 1.0)
    assert costs.of_class("p").transfer_s(10_000) == pytest.approx(1.0)
    assert costs.of_class("p").network_bytes_per_s == pytest.approx(1e9)


def test_hand_overs_are_believed_by_their_quick_ones_until_fetches_were_seen() -> None:
    costs = CostModels(default=COLD)
    fitting = TransferFitting(costs)
    for number in range(40):
        # Half of them waited for their turn in decode.
        fitting.observe_hand_over("p", 10_000, 0.5 if number % 2 else 4.0)
    assert costs.of_class("p").transfer_s(10_000) == pytest.approx(0.5)
    for _ in range(LEAST_SEEN):
        fitting.observe_fetch("p", 10_000, 0.8)
    assert costs.of_class("p").transfer_s(10_000) == pytest.approx(0.8)


def test_without_a_known_size_tokens_are_what_is_counted() -> None:
    costs = CostModels()
    fitting = TransferFitting(costs)
    for _ in range(LEAST_SEEN):
        fitting.observe_fetch("p", 4_000, 0.4)
    assert costs.of_class("p").transfer_s(8_000) == pytest.approx(0.8)
    assert costs.of_class("p").transfer_s(8_000, source_flows=1) == pytest.approx(1.6)


def test_short_transfers_and_impossible_times_tell_nothing() -> None:
    costs = CostModels(default=COLD)
    fitting = TransferFitting(costs)
    for tokens, seconds in ((LEAST_TOKENS - 1, 1.0), (9_000, 0.0), (9_000, -1.0), (9_000, float("inf"))):
        for _ in range(LEAST_SEEN):
            fitting.observe_fetch("p", tokens, seconds)
    assert costs.of_class("p").transfer_s(10_000) == 0


def test_a_profile_is_believed_before_anything_that_is_seen() -> None:
    profile = CostModel.from_profile(LLAMA3_70B_A800)
    costs = CostModels(default=profile)
    fitting = TransferFitting(costs)
    for _ in range(100):
        fitting.observe_fetch("p", 10_000, 9.0)
    assert costs.of_class("p") == profile
