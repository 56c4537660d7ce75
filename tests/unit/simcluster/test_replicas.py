"""Copies of popular blocks over time."""

from __future__ import annotations

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import Request


def _burst(prompts: int) -> list[Request]:
    """Prompts with a long common beginning, faster than one instance can compute them."""
    return [
        Request(
            timestamp_ms=150.0 * at, input_length=21 * 512, output_length=10,
            hash_ids=(*range(20), 1_000 + at),
        )
        for at in range(prompts)
    ]  # fmt: skip


def test_a_popular_prefix_spreads_over_instances_where_they_fetch_from_each_other() -> None:
    replicas = simulate(ClusterSpec(4, 2, fetch="peer"), _burst(80)).replicas
    assert replicas is not None
    # 100 different blocks, no 1 000.
    assert list(replicas.holders) == [10, 100]
    popular, last = replicas.holders[10], replicas.holders[100]
    assert len(popular) == 120
    assert all(0 <= count <= 4 for count in popular)
    assert popular[-1] > 1
    assert max(last) <= 1


def test_the_store_is_no_replica() -> None:
    replicas = simulate(ClusterSpec(1, 1, fetch="store"), _burst(10)).replicas
    assert replicas is not None
    assert max(replicas.holders[10]) == 1
