import pytest

from mooncake_simulator.engine.pool import BlockPool, Cleared, OutOfBlocksError, Removed


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    for number, (block, name) in enumerate(zip(blocks, names, strict=True)):
        assert pool.store(block, name, number)
    return blocks


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    pool.release(reversed(cached(pool, b"a", b"b", b"c")))
    pool.allocate(2)
    assert pool.cached_hashes() == [b"a"]
    assert pool.take_events() == [Removed(b"c"), Removed(b"b")]


def test_blocks_without_content_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    kept = cached(pool, b"a")
    bare = pool.allocate(2)
    pool.release(kept)
    pool.release(bare)
    assert sorted(pool.allocate(2)) == sorted(bare)
    assert pool.cached_hashes() == [b"a"]


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(3)
    cached(pool, b"a")
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.match([b"a"]) != []


def test_the_placeholder_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2)) == [1, 2]
    assert pool.usage == 1.0


def test_clearing_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, b"a")
    assert not pool.clear()
    pool.release(blocks)
    assert pool.clear()
    assert pool.cached_hashes() == []
    assert pool.take_events() == [Cleared()]


def test_letting_go_twice_is_an_error() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)
