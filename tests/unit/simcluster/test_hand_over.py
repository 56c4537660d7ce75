"""A prompt's KV on its way to decode: it shares its node's way out with all else that leaves it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.links import Link
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads.traces import Request, blocks_of

TOKENS = 10_240
COMPUTED_S = CostModel.from_profile(LLAMA3_70B_A800).prefill_s(TOKENS, 0)


def over_a_network_of(leaves_s: float, prefill: int) -> list[float]:
    """When two prompts that come at once have their last of two tokens.

    Args:
        leaves_s: seconds that the KV of one of them takes to leave its node.
        prefill: instances.
    """
    bytes_per_s = TOKENS * LLAMA3_70B_A800.kv_bytes_per_token / leaves_s
    profile = replace(LLAMA3_70B_A800, network_bytes_per_s=bytes_per_s)
    blocks = blocks_of(TOKENS)
    requests = [
        Request(timestamp_ms=0, input_length=TOKENS, output_length=2, hash_ids=tuple(range(at, at + blocks)))
        for at in (0, 1_000)
    ]
    result = simulate(ClusterSpec(prefill, 1, profile, fetch="none"), requests)
    return sorted(outcome.last_s for outcome in result.outcomes)


def test_two_prompts_of_one_node_leave_it_one_after_the_other() -> None:
    first_s, second_s = over_a_network_of(20.0, prefill=1)
    assert first_s == pytest.approx(20.0, abs=0.1)
    assert second_s == pytest.approx(40.0, abs=0.1)


def test_prompts_of_two_nodes_leave_them_at_once() -> None:
    first_s, second_s = over_a_network_of(20.0, prefill=2)
    assert first_s == pytest.approx(20.0, abs=0.1)
    assert second_s == pytest.approx(20.0, abs=0.1)


def test_kv_that_leaves_faster_than_it_is_computed_is_there_with_its_last_layer() -> None:
    first_s, second_s = over_a_network_of(COMPUTED_S / 10, prefill=1)
    assert first_s == pytest.approx(COMPUTED_S, abs=0.1)
    assert second_s == pytest.approx(2 * COMPUTED_S, abs=0.1)


def test_what_is_fetched_from_a_node_waits_for_a_hand_over_that_no_router_sees() -> None:
    link = Link(bytes_per_s=10.0)
    assert link.hand_over(50.0, now_s=1.0) == 6.0
    assert link.flows(2.0) == 0
    assert link.send(10.0, now_s=2.0) == 7.0
    assert link.flows(6.5) == 1
    assert link.flows(7.0) == 0
    assert link.bytes == 60.0
