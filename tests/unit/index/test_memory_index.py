from array import array
from random import Random

import pytest

from mooncake_core.index import Depth, MemoryIndex, Removed, Source, Stored, Tier

A, B = Source("a", 1), Source("b", 1)


def prompt(number: int, blocks: int = 32) -> array:
    chance = Random(number)
    return array("Q", (chance.getrandbits(64) for _ in range(blocks)))


async def store(index: MemoryIndex, source: Source, keys, sequence: int) -> None:
    await index.apply(source, [Stored(keys, Tier.HBM)], sequence)


async def test_tens_of_thousands_of_blocks_are_found_again_and_removed_without_a_trace() -> None:
    index = MemoryIndex()
    await index.attach(A)
    await index.attach(B)
    for number in range(1000):
        await store(index, A, prompt(number), number)
        await store(index, B, prompt(number)[: number % 33], number)
    assert len(index) == 32_000
    for number in range(1000):
        own = {"b": Depth(number % 33, number % 33, number % 33)} if number % 33 else {}
        assert await index.match(prompt(number)) == {"a": Depth(32, 32, 32), **own}
    for number in range(1000):
        for source in (A, B):
            await index.apply(source, [Removed(prompt(number), Tier.HBM)], 1000 + number)
    assert len(index) == 0
    assert len(index._sets) == 0


async def test_over_budget_the_prompts_stored_longest_ago_go_first_and_whole() -> None:
    index = MemoryIndex(max_blocks=6400)
    await index.attach(A)
    for number in range(1000):
        await store(index, A, prompt(number), number)
    assert 6000 <= len(index) <= 6400
    depths = [(await index.match(prompt(number))).get("a", Depth(0, 0, 0)).hbm for number in range(1000)]
    assert set(depths) == {0, 32}, "a prompt was forgotten in part"
    assert depths == sorted(depths), "a younger prompt went before an older one"


async def test_what_is_stored_again_and_again_outlives_everything_else() -> None:
    index = MemoryIndex(max_blocks=640)
    await index.attach(A)
    hot, rare = prompt(0), prompt(1)
    await store(index, A, rare, 0)
    for number in range(2, 3000):
        await store(index, A, hot, 2 * number)
        await store(index, A, prompt(number, blocks=4), 2 * number + 1)
        assert await index.match(hot) == {"a": Depth(32, 32, 32)}
    assert await index.match(rare) == {}


async def test_what_fits_the_budget_is_never_forgotten_however_much_comes_and_goes() -> None:
    index = MemoryIndex(max_blocks=640)
    await index.attach(A)
    system_prompt = prompt(0)
    await store(index, A, system_prompt, 0)
    for number in range(1, 5000):
        keys = prompt(number, blocks=8)
        await index.apply(A, [Stored(keys, Tier.HBM), Removed(keys, Tier.HBM)], number)
    assert await index.match(system_prompt) == {"a": Depth(32, 32, 32)}
    assert len(index) == 32


async def test_one_update_larger_than_the_budget_is_kept_until_the_next() -> None:
    index = MemoryIndex(max_blocks=100)
    await index.attach(A)
    await store(index, A, prompt(0, blocks=500), 0)
    assert (await index.match(prompt(0, blocks=500)))["a"].hbm == 500
    for number in range(1, 20):
        await store(index, A, prompt(number), number)
    assert await index.match(prompt(0, blocks=500)) == {}
    assert len(index) <= 100 + 32


async def test_records_of_the_forgotten_are_cleaned_away() -> None:
    index = MemoryIndex(max_blocks=2000)
    await index.attach(A)
    for number in range(3000):
        await store(index, A, prompt(number), number)
    assert index._table._records < 2 * 2000
    assert len(index._sets) == 1


async def test_slots_of_ended_lives_serve_again_after_the_sweep() -> None:
    index = MemoryIndex()
    await index.attach(B)
    await store(index, B, prompt(0)[:10], 0)
    for epoch in range(1, 50):
        await index.attach(Source("a", epoch))
        await store(index, Source("a", epoch), prompt(0), 0)
        assert (await index.match(prompt(0)))["a"] == Depth(32, 32, 32)
        while await index.sweep(3):
            pass
    assert index._slots <= 3
    await index.detach(Source("a", 49))
    while await index.sweep(3):
        pass
    assert len(index) == 10


async def test_a_hole_in_a_short_prompt_ends_the_depth_and_in_a_long_one_is_counted() -> None:
    index = MemoryIndex()
    await index.attach(A)
    keys = prompt(0, blocks=2000)
    await index.apply(A, [Stored(keys, Tier.DRAM), Removed(keys[10:11], Tier.DRAM)], 0)
    assert await index.match(keys[:64]) == {"a": Depth(0, 10, 10)}
    await index.apply(A, [Removed(keys[10:990], Tier.DRAM)], 1)
    depths = {(await index.match(keys))["a"].dram for _ in range(10)}
    assert min(depths) == 10
    assert index.stats.holes >= 1


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, 0x0101010101010101])
async def test_any_64_bits_are_a_key(key: int) -> None:
    index = MemoryIndex()
    await index.attach(A)
    await store(index, A, [key], 0)
    assert await index.match([key]) == {"a": Depth(1, 1, 1)}
    await index.apply(A, [Removed([key], Tier.HBM)], 1)
    assert await index.match([key]) == {}


async def test_keys_that_look_like_others_across_record_borders_are_told_apart() -> None:
    index = MemoryIndex()
    await index.attach(A)
    chance = Random(3)
    # Few distinct bytes and equal low bits: many false hits of the byte search in one bucket.
    keys = list({sum(chance.choice((0, 1)) << 8 * byte for byte in range(1, 8)) for _ in range(400)})
    await store(index, A, keys[::2], 0)
    for key in keys[::2]:
        assert await index.match([key]) == {"a": Depth(1, 1, 1)}
    for key in keys[1::2]:
        assert await index.match([key]) == {}
