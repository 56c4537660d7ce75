"""What events of an engine mean for others."""

from array import array
from collections.abc import Sequence
from typing import Any

from mooncake_core.blocks import block_keys
from mooncake_core.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from mooncake_core.index import Removed, Stored, Tier
from mooncake_sidecar.engine.mirror import Effect, Mirror, Shared

TOKENS = list(range(100, 116))
KEYS = list(block_keys(TOKENS, 4))
A, B, C = (bytes([n]) * 32 for n in range(3))
"""Names as the store knows them."""


def stored(
    names: Sequence[BlockHash], tokens: list[int], parent: BlockHash | None = None, **fields: Any
) -> BlockStored:
    return BlockStored(
        hashes=tuple(names), parent=parent, token_ids=array("I", tokens), block_size=4, **fields
    )


def tell(mirror: Mirror, *events: Event) -> Effect:
    effects = Effect([], [])
    for event in events:
        step = mirror.read(event)
        if step is not None:
            own, shared = mirror.carry_out(step)
            effects.own.extend(own)
            effects.shared.extend(shared)
    return effects


def plain(changes: list[Any]) -> list[tuple[str, list[int], Tier]]:
    return [(type(change).__name__, list(change.keys), change.tier) for change in changes]


def test_blocks_are_keyed_as_everyone_keys_them_whatever_the_engine_calls_them() -> None:
    mirror = Mirror(has_pool=False)
    effect = tell(mirror, stored([11, 12], TOKENS[:8]), stored([13, 14], TOKENS[8:], parent=12))
    assert plain(effect.own) == [("Stored", KEYS[:2], Tier.HBM), ("Stored", KEYS[2:], Tier.HBM)]


def test_salt_and_lora_of_the_first_block_hold_for_all_that_follow() -> None:
    mirror = Mirror(has_pool=False)
    effect = tell(
        mirror,
        stored([1], TOKENS[:4], lora_name="french", cache_salt="tenant"),
        stored([2], TOKENS[4:8], parent=1, lora_name="french"),
    )
    salted = list(block_keys(TOKENS[:8], 4, lora_name="french", cache_salt="tenant"))
    assert [key for change in effect.own for key in change.keys] == salted


def test_a_block_whose_parent_is_unknown_is_counted_and_not_keyed() -> None:
    mirror = Mirror(has_pool=False)
    assert tell(mirror, stored([2, 3], TOKENS[:8], parent=1)) == ([], [])
    assert mirror.orphans == 2


def test_blocks_that_tokens_do_not_determine_are_left_out_and_so_are_their_children() -> None:
    mirror = Mirror(has_pool=False)
    effect = tell(mirror, stored([1, 2], TOKENS[:8], opaque_from=1), stored([3], TOKENS[8:12], parent=2))
    assert plain(effect.own) == [("Stored", KEYS[:1], Tier.HBM)]
    assert (mirror.opaque, mirror.orphans) == (1, 1)


def test_a_block_that_two_requests_computed_is_there_until_both_copies_are_gone() -> None:
    mirror = Mirror(has_pool=False)
    tell(mirror, stored([1], TOKENS[:4]))
    assert tell(mirror, stored([1], TOKENS[:4])).own == []
    assert tell(mirror, BlockRemoved(hashes=(1,))).own == []
    assert plain(tell(mirror, BlockRemoved(hashes=(1,))).own) == [("Removed", KEYS[:1], Tier.HBM)]
    assert tell(mirror, BlockRemoved(hashes=(1, 99))).own == []
    assert len(mirror) == 0


def test_without_a_pool_lower_tiers_are_the_engines_own() -> None:
    mirror = Mirror(has_pool=False)
    effect = tell(mirror, stored([1], TOKENS[:4]), stored([1], TOKENS[:4], medium=Tier.DRAM))
    assert plain(effect.own)[1] == ("Stored", KEYS[:1], Tier.DRAM)
    assert plain(tell(mirror, BlockRemoved(hashes=(1,))).own) == [("Removed", KEYS[:1], Tier.HBM)]
    assert plain(tell(mirror, BlockRemoved(hashes=(1,), medium=Tier.DRAM)).own) == [
        ("Removed", KEYS[:1], Tier.DRAM)
    ]


def test_with_a_pool_lower_tiers_are_the_pools_and_outlive_the_engines_cache() -> None:
    mirror = Mirror(has_pool=True)
    effect = tell(mirror, stored([A, B], TOKENS[:8]), stored([B], TOKENS[4:8], parent=A, medium=Tier.DRAM))
    assert plain(effect.own) == [("Stored", KEYS[:2], Tier.HBM)]
    assert effect.shared == [Shared(B, KEYS[1], Tier.DRAM)]
    tell(mirror, AllBlocksCleared())
    assert mirror.own() == []
    assert list(mirror.shared()) == [Shared(B, KEYS[1], Tier.DRAM)]
    tell(mirror, BlockRemoved(hashes=(B,), medium=Tier.DRAM))
    assert len(mirror) == 0


def test_a_child_in_hbm_finds_its_parent_in_the_pool() -> None:
    mirror = Mirror(has_pool=True)
    tell(mirror, stored([A], TOKENS[:4], medium=Tier.DRAM))
    assert plain(tell(mirror, stored([B], TOKENS[4:8], parent=A)).own) == [("Stored", KEYS[1:2], Tier.HBM)]


def test_all_that_is_held_comes_from_the_start_of_prompts_on() -> None:
    mirror = Mirror(has_pool=False)
    tell(mirror, stored([1, 2, 3, 4], TOKENS), stored([1], TOKENS[:4], medium=Tier.SSD))
    assert plain(mirror.own()) == [("Stored", KEYS, Tier.HBM), ("Stored", KEYS[:1], Tier.SSD)]


def test_an_image_restores_everything() -> None:
    mirror = Mirror(has_pool=True)
    tell(
        mirror,
        stored([A, B], TOKENS[:8], cache_salt="s"),
        stored([A], TOKENS[:4], cache_salt="s"),
        stored([B], TOKENS[4:8], parent=A, medium=Tier.DRAM),
    )
    again = Mirror(has_pool=True)
    again.restore(mirror.image())
    assert again.image() == mirror.image()
    following = stored([C], TOKENS[8:12], parent=B)
    assert tell(again, following) == tell(mirror, following)
    assert tell(again, BlockRemoved(hashes=(A,))).own == []


def test_changes_carried_out_one_by_one_lead_to_what_is_held() -> None:
    mirror = Mirror(has_pool=False)
    effect = tell(
        mirror, stored([1, 2, 3], TOKENS[:12]), BlockRemoved(hashes=(3,)), stored([3], TOKENS[8:12], parent=2)
    )
    held: set[int] = set()
    for change in effect.own:
        if isinstance(change, Stored):
            held |= set(change.keys)
        else:
            assert isinstance(change, Removed)
            held -= set(change.keys)
    assert held == set(KEYS[:3])


def test_blocks_of_the_pool_with_shortened_names_are_counted_and_left_out() -> None:
    mirror = Mirror(has_pool=True)
    tell(mirror, stored([1], TOKENS[:4]))
    assert tell(mirror, stored([1], TOKENS[:4], medium=Tier.DRAM)) == ([], [])
    assert mirror.nameless == 1
