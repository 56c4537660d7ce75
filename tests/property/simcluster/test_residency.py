"""Masks by block say the same as a cache for each instance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_simulator.cluster.residency import Residency

CAPACITIES = (3, 6, None)
prompts = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
steps = st.lists(st.tuples(st.integers(0, 2), prompts, st.booleans()), max_size=30)


def _depth(cache: list[int], blocks: list[int]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in cache), len(blocks))


@given(steps, prompts)
def test_depths_are_those_of_plain_caches(
    history: list[tuple[int, list[int], bool]], asked: list[int]
) -> None:
    residency = Residency(CAPACITIES)
    held: list[list[int]] = [[], [], []]  # used longest ago first
    present: list[set[int]] = [set(), set(), set()]
    for instance, blocks, arrives in history:
        residency.promise(instance, blocks)
        cache = [block for block in held[instance] if block not in blocks] + blocks[::-1]
        capacity = CAPACITIES[instance]
        held[instance] = cache if capacity is None else cache[-capacity:]
        if arrives:
            residency.arrive(instance, blocks)
            present[instance] |= set(blocks)
        present[instance] &= set(held[instance])
    assert residency.promised_depths(asked) == [_depth(cache, asked) for cache in held]
    assert residency.present_depths(asked) == [_depth(sorted(blocks), asked) for blocks in present]
    for block in range(8):
        assert residency.holders(block) == sum(block in blocks for blocks in present)
    residency.clear(2)
    assert residency.promised_depths(asked)[2] == 0
