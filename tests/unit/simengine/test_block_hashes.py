"""Block hashes against numbers made with vLLM 0.32's own functions (sha256, hash_block_tokens)."""

import pytest

from mooncake_core.blocks import block_keys
from mooncake_simulator.engine.hashing import BlockHasher, BlockNames, external_hash

TOKENS = list(range(100, 112))
FROM_VLLM = {
    (None, None): [
        "007f699eb7d4928d9961af00e454b36a0a0a4098a8d565689dc54be60c72d352",
        "7067919812d6ecf8ea6b4199b9c36fc7afe48233e61604824281af633744a7d8",
        "6910c68aa4e180c2f9750095acc2dd53e6fea460f0c1aa835c4c2942a367378d",
    ],
    (None, "tenant-a"): [
        "749184ef43d40d21d4804393c2861535202b942ed016446cb8c2e5427ce513de",
        "47f98c3a70f8ecb1a95a78ab60e95f2004eef1bfe167a216864d8851a07a4de6",
        "417eba3eb42820154a6e698e133fb6a38cc5468a8abb1947a3ed49440dc736e4",
    ],
    ("0", None): [
        "e14b227484d5c5ee19f2ab704da668ca2ce046ae6138052ad6477e9610f8b1e4",
        "2fbb6da4ad5d92b8e8bfb50d5230de55be53df9ac2589e8790a677ba601aeb86",
        "f29fa8c667938914ba02e4d096033d9b44253531955b53c649a3bc2bf362873e",
    ],
    ("0", "tenant-a"): [
        "e704cc829fc0a46d7d28f7a3821ae0083bbdd757680990470a0813136d41c9bd",
        "2afecee6b5afddd8b287dec24247bedf791a7504a3d1c3ba7c92da61188ef1ae",
        "1e5b7e47cb73cc25ade7f4d865181876ed0524bfc1e1751157738042d7d50323",
    ],
}


@pytest.mark.parametrize(("seed", "salt"), FROM_VLLM)
def test_hashes_are_those_of_vllm_for_the_same_hash_seed_and_salt(seed: str | None, salt: str | None) -> None:
    names = BlockNames()
    BlockHasher(4, seed).extend(names, TOKENS, salt, len(TOKENS))
    assert [block_hash.hex() for block_hash in names.hashes] == FROM_VLLM[seed, salt]


def test_a_chain_grown_token_by_token_is_the_chain_hashed_at_once() -> None:
    hasher = BlockHasher(4, None)
    at_once, grown = BlockNames(), BlockNames()
    hasher.extend(at_once, TOKENS, "s", len(TOKENS))
    for end in range(len(TOKENS) + 1):
        hasher.extend(grown, TOKENS, "s", end)
    assert grown == at_once
    assert grown.keys == list(block_keys(TOKENS, 4, cache_salt="s"))


def test_events_carry_the_last_eight_bytes_as_an_unsigned_number_or_the_whole_digest() -> None:
    block_hash = bytes.fromhex(FROM_VLLM[None, None][0])
    assert external_hash(block_hash, as_int=True) == 11368576285790098258
    assert external_hash(block_hash, as_int=False) == block_hash
