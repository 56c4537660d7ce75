from hypothesis import given
from hypothesis import strategies as st

from mooncake_core.index import Tier
from mooncake_core.index.gallop import gallop
from mooncake_core.index.holders import cumulative, depths_by_slot, holding, lanes

SLOTS = 5
depths = st.lists(st.integers(0, 300), min_size=SLOTS, max_size=SLOTS)
checks = st.lists(st.floats(0, 1, exclude_max=True), max_size=8)


def bits_at(depths: list[int], position: int) -> int:
    return sum(1 << slot for slot, depth in enumerate(depths) if position < depth)


@given(length=st.integers(1, 300), depths=depths, checks=checks)
def test_without_holes_every_depth_is_exact_and_few_blocks_are_looked_at(length, depths, checks) -> None:
    found = gallop(length, lambda position: bits_at(depths, position), checks)
    by_slot = {slot: drop.depth for drop in found.drops for slot in range(SLOTS) if drop.bits >> slot & 1}
    assert by_slot == {slot: min(depth, length) for slot, depth in enumerate(depths) if depth}
    assert not found.hole
    assert found.looks <= max(64, len(set(depths)) * 9 + 1 + len(checks))


@given(held=st.lists(st.integers(0, 7), min_size=65, max_size=200), checks=checks)
def test_with_holes_a_depth_is_never_less_than_true_and_ends_on_a_held_block(held, checks) -> None:
    found = gallop(len(held), held.__getitem__, checks)
    for bits, depth in found.drops:
        for bit in range(3):
            if bits >> bit & 1:
                true = next((n for n, h in enumerate(held) if not h >> bit & 1), len(held))
                assert depth >= true
                assert held[depth - 1] >> bit & 1


@given(held=st.lists(st.integers(0, 7), min_size=1, max_size=64))
def test_a_short_prefix_is_exact_whatever_the_holes(held) -> None:
    found = gallop(len(held), held.__getitem__, [])
    for bits, depth in found.drops:
        for bit in range(3):
            if bits >> bit & 1:
                assert depth == next((n for n, h in enumerate(held) if not h >> bit & 1), len(held))


@given(
    tiers=st.lists(st.integers(0, 7), min_size=SLOTS, max_size=SLOTS), live=st.sets(st.integers(0, SLOTS - 1))
)
def test_a_nearer_tier_counts_for_every_deeper_one_and_the_dead_for_none(tiers, live) -> None:
    holders = sum(holding(slot, Tier(bits)) for slot, bits in enumerate(tiers))
    found = dict(depths_by_slot(gallop(1, lambda _: cumulative(holders, lanes(live)), []).drops))
    expected = {
        slot: (int(bits & 1 > 0), int(bits & 3 > 0), 1)
        for slot, bits in enumerate(tiers)
        if bits and slot in live
    }
    assert found == expected
